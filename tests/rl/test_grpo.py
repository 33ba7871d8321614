"""The clean stages against closed forms, the sampler against other ways to get the same numbers, and the loop."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.catalogue import find
from harness.inject import Injection
from harness.rl import grpo, loop
from harness.rl.context import keyed_seed
from harness.rl.policy import Policy, positions
from harness.rl.rollout import sample
from harness.rl.run import Run
from harness.rl.stages import Batch, Stage, Stages
from harness.seams import Schedule
from harness.spec import RLSpec, RunSpec, SideSpec, TaskSpec
from harness.trace import first_difference
from tests.conftest import SMALL, Bench

F64 = torch.float64


def test_estimators_of_the_kl_by_hand() -> None:
    logprobs, ref = torch.tensor([-1.0, -2.0], dtype=F64), torch.tensor([-1.5, -1.0], dtype=F64)
    assert grpo.kl_k1(logprobs, ref).tolist() == [0.5, -1.0]
    assert grpo.kl_k2(logprobs, ref).tolist() == [0.125, 0.5]
    expected = [math.exp(-0.5) + 0.5 - 1, math.exp(1.0) - 1.0 - 1]
    assert grpo.kl_k3(logprobs, ref).tolist() == pytest.approx(expected)


def test_k1_and_k3_are_unbiased_for_the_exact_kl() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=F64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=F64)
    exact = float((p * (p / q).log()).sum())
    assert float((p * grpo.kl_k1(p.log(), q.log())).sum()) == pytest.approx(exact)
    assert float((p * grpo.kl_k3(p.log(), q.log())).sum()) == pytest.approx(exact)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, 0.0),
        (1.5, 2.0, -2.4, 1.0),  # clipped at 1.2
        (0.5, 2.0, -1.0, 0.0),  # the pessimistic side is not clipped
        (0.5, -2.0, 1.6, 1.0),  # clipped at 0.8
        (1.5, -2.0, 3.0, 0.0),
        (9.0, -2.0, 18.0, 0.0),  # nothing bounds it without the dual clip
    ],
)
def test_clipped_surrogate_by_hand(ratio: float, advantage: float, loss: float, clipped: float) -> None:
    args = torch.tensor([[ratio]], dtype=F64), torch.tensor([[advantage]], dtype=F64)
    found, flag = grpo.clipped_surrogate(*args, RLSpec())
    assert (float(found), float(flag)) == (pytest.approx(loss), clipped)
    dual, _ = grpo.clipped_surrogate(*args, RLSpec(dual_clip=3.0))
    assert float(dual) == pytest.approx(min(loss, 6.0) if advantage < 0 else loss)


def test_ratios_by_hand() -> None:
    logprobs, old = torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.5, -1.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    assert grpo.token_ratio(logprobs, old, mask)[0].tolist() == pytest.approx([math.exp(0.5), math.exp(-1.0), 1.0])
    assert grpo.sequence_ratio(logprobs, old, mask)[0].tolist() == pytest.approx([math.exp(-0.25)] * 3)


def batch_of(lengths: list[int], responses: int = 5) -> Batch:
    mask = torch.tensor([[1.0] * n + [0.0] * (responses - n) for n in lengths])
    tokens = torch.zeros(len(lengths), responses + 2, dtype=torch.int64)
    return Batch(tokens, torch.ones_like(tokens), mask, tuple("x" for _ in lengths), group_size=2)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 5), min_size=4, max_size=4), st.sampled_from([1, 2, 4]))
def test_shares_of_micro_batches_add_up_to_the_mean_of_the_mini_batch(lengths: list[int], parts: int) -> None:
    values = torch.arange(20.0).view(4, 5).sin()
    (mini,) = batch_of(lengths).mini_batches(1)
    flat = [float(v) for row, n in zip(values, lengths, strict=True) for v in row[:n]]
    sequences = [float(row[:n].mean()) for row, n in zip(values, lengths, strict=True)]
    size = 4 // parts
    micros = list(mini.split(parts))
    pieces = [values[i * size : (i + 1) * size] for i in range(parts)]
    tokens = sum(float(grpo.token_mean(v, m)) for v, m in zip(pieces, micros, strict=True))
    per_sequence = sum(float(grpo.sequence_mean(v, m)) for v, m in zip(pieces, micros, strict=True))
    assert tokens == pytest.approx(sum(flat) / len(flat), abs=1e-6)
    assert per_sequence == pytest.approx(sum(sequences) / 4, abs=1e-6)


def test_advantages_by_hand() -> None:
    batch = batch_of([1, 1, 1, 1]).with_(rewards=torch.tensor([0.0, 1.0, 0.5, 0.5]))
    ctx = type("Ctx", (), {"rl": RLSpec()})
    std = math.sqrt(0.5)  # of 0 and 1, with n - 1
    found = grpo.advantage(ctx, batch).advantages
    assert found is not None
    assert found.tolist() == pytest.approx([-0.5 / (std + 1e-4), 0.5 / (std + 1e-4), 0.0, 0.0])
    ctx = type("Ctx", (), {"rl": RLSpec(algorithm="ppo")})
    centred = [-0.5, 0.5, 0.0, 0.0]
    whole = math.sqrt(sum(c * c for c in centred) / 3)
    assert grpo.advantage(ctx, batch).advantages.tolist() == pytest.approx([c / whole for c in centred])


def test_log_probabilities_and_entropy_against_torchs_distribution() -> None:
    logits = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0), dtype=F64)
    tokens = torch.randint(0, 7, (3, 4), generator=torch.Generator().manual_seed(1))
    oracle = torch.distributions.Categorical(logits=logits / 0.7)
    torch.testing.assert_close(grpo.token_logprob(logits, tokens, 0.7), oracle.log_prob(tokens))
    torch.testing.assert_close(grpo.token_entropy(logits, 0.7), oracle.entropy())


def prompts(checkpoint: Path, texts: list[str]) -> tuple[Any, Batch]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    batch = Batch(encoded["input_ids"], encoded["attention_mask"], torch.zeros(len(texts), 0), tuple(texts))
    return tokenizer, batch


def test_sampler_records_what_teacher_forcing_gives(checkpoint: Path) -> None:
    texts = ["1+1=", "<abcde=", "#98765=", ">1="]
    tokenizer, batch = prompts(checkpoint, texts)
    policy, ops = Policy.load(checkpoint, SideSpec()), grpo.clean_ops(RLSpec())
    uniforms = torch.rand(4, 6, generator=torch.Generator().manual_seed(5))
    tokens, mask, logprobs = sample(policy, batch, uniforms, 0.8, ops, tokenizer)
    whole = batch.with_(
        tokens=torch.cat([batch.tokens, tokens], 1),
        attention_mask=torch.cat([batch.attention_mask, mask.long()], 1),
        response_mask=mask,
    )
    with torch.no_grad():
        forced = policy.score(whole, ops, 0.8).logprobs * mask
    torch.testing.assert_close(logprobs, forced, rtol=1e-5, atol=1e-5)
    for row in range(4):  # a row does not depend on the others, nor on how far it is padded
        _, alone = prompts(checkpoint, [texts[row]])
        single, single_mask, _ = sample(policy, alone, uniforms[row : row + 1], 0.8, ops, tokenizer)
        assert torch.equal(single[0], tokens[row])
        assert torch.equal(single_mask[0], mask[row])


def test_sampler_at_a_tiny_temperature_is_greedy_generation(checkpoint: Path) -> None:
    tokenizer, batch = prompts(checkpoint, ["1+1=", "<abcde=", "#98765="])
    policy = Policy.load(checkpoint, SideSpec())
    tokens, _, _ = sample(policy, batch, torch.full((3, 6), 0.5), 1e-4, grpo.clean_ops(RLSpec()), tokenizer)
    greedy = policy.model.generate(
        batch.tokens, attention_mask=batch.attention_mask, do_sample=False, max_new_tokens=6
    )[:, batch.tokens.shape[1] :]
    assert torch.equal(tokens[:, : greedy.shape[1]], greedy)


def test_sampler_draws_from_the_distribution(checkpoint: Path) -> None:
    tokenizer, one = prompts(checkpoint, ["1+1="])
    policy, ops = Policy.load(checkpoint, SideSpec()), grpo.clean_ops(RLSpec())
    n = 4000
    many = one.with_(tokens=one.tokens.expand(n, -1), attention_mask=one.attention_mask.expand(n, -1))
    uniforms = torch.rand(n, 1, generator=torch.Generator().manual_seed(2))
    tokens, _, logprobs = sample(policy, many, uniforms, 0.8, ops, tokenizer)
    with torch.no_grad():
        logits = policy.model(one.tokens, position_ids=positions(one.attention_mask)).logits[0, -1]
    probs = (logits / 0.8).softmax(-1)
    counts = torch.bincount(tokens[:, 0], minlength=len(probs))
    spread = (n * probs * (1 - probs)).sqrt()
    assert ((counts - n * probs).abs() <= 5 * spread + 1e-6).all()
    torch.testing.assert_close(logprobs[:, 0].exp(), probs[tokens[:, 0]])


def test_stages_run_in_the_order_of_the_house() -> None:
    called: list[str] = []

    def stage(name: str) -> Any:
        def call(*args: Any) -> Any:
            called.append(name)
            return batch_of([1, 1, 1, 1]) if name in ("prompts", "rollout", "rollout_logprobs", "reward") else args[-1]

        return call

    table = Stages({s: stage(s.value) for s in Stage})
    ctx = type("Ctx", (), {"rl": RLSpec(prompts_per_step=2, group_size=2, updates_per_rollout=2, micro_batches=2)})
    loop.run(table, [ctx])
    head = ["prompts", "rollout", "rollout_logprobs", "reward", "advantage", "old_logprobs"]
    micro = ["logprobs", "loss", "scale", "backward"]
    tail = ["reduce", "unscale", "clip", "step"]
    assert called == head + 2 * (2 * micro + tail) + ["sync"]


def test_replayed_tape_gives_the_clean_trace_but_for_the_rollouts_own_numbers(clean: dict[str, Any]) -> None:
    free, replay = clean["free"], clean["replay"]
    for name in free.metrics:
        if not name.startswith("logprob_gap"):
            assert free.column(name) == replay.column(name), name
    assert max(replay.column("logprob_gap")) < 1e-5


def test_runs_are_bit_identical_and_seeds_differ(bench: Bench, clean: dict[str, Any]) -> None:
    assert first_difference(bench.run("free")[0], clean["free"]) is None
    assert first_difference(bench.run("free", seed=1)[0], clean["free"]) == (0, "entropy")


def test_random_streams_are_keyed() -> None:
    keys = {keyed_seed(s, name, t) for s in range(3) for name in ("a", "b") for t in range(3)}
    assert len(keys) == 18
    assert all(0 <= k < 2**63 for k in keys)
    assert keyed_seed(1, "a", 2) == keyed_seed(1, "a", 2)


def count_calls(bench: Bench, fault: str | None) -> int:
    """Python calls of the second step of a run."""
    calls = 0

    def profiler(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    def counted(contexts: Any) -> Any:
        for ctx in contexts:
            yield ctx
            sys.setprofile(profiler if ctx.step == 0 else None)

    spec = RunSpec(weights="test", task=TaskSpec(), rl=SMALL, mode="replay", steps=2, seed=0)
    run = Run(spec, bench.folder, lambda _record: None, bench.tape)
    steps = run.contexts()
    try:
        if fault is None:
            loop.run(run.recorder.stages, run.recorder.steps(counted(steps)))
        else:
            with Injection(find(fault), find(fault).ref(schedule=Schedule(99)), run) as injection:
                loop.run(run.recorder.stages, run.recorder.steps(counted(_awake_check_only(injection, steps))))
    finally:
        sys.setprofile(None)
    return calls


def _awake_check_only(injection: Injection, steps: Any) -> Any:
    """The injector's own work lies between the steps, outside of what is counted."""
    return injection.steps(steps)


@pytest.mark.parametrize("fault", ["grad_overflow", "router_logits_bf16", "swiglu_gate_up_swap"])
def test_a_sleeping_fault_adds_no_call_to_the_step(bench: Bench, fault: str) -> None:
    clean_calls = count_calls(bench, None)
    between = 3  # injection.steps resumed, schedule.awake, and the generator behind it: per step, not per stage
    assert clean_calls > 1000
    assert 0 <= count_calls(bench, fault) - clean_calls <= between


def test_batch_slices_every_field_and_refuses_uneven_parts() -> None:
    batch = batch_of([1, 2, 3, 4]).with_(rewards=torch.arange(4.0), completions=("a", "b", "c", "d"))
    part = batch.rows(1, 3)
    assert part.rewards is not None
    assert (part.rewards.tolist(), part.completions, len(part)) == ([1.0, 2.0], ("b", "c"), 2)
    assert [m.loss_tokens for m in batch.mini_batches(2)] == [3.0, 7.0]
    with pytest.raises(ValueError, match="4 sequences cannot be split into 3 equal parts"):
        list(batch.split(3))
    assert {f.name for f in dataclasses.fields(Batch)} >= {"tokens", "routing"}
