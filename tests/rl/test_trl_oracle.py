"""TRL's GRPOTrainer as oracle: loss, entropy, KL, clip fraction and gradient norm on the same tokens and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.rl.engines.torch_engine import global_norm
from harness.rl.run import Run
from harness.rl.stages import Batch
from harness.spec import RLSpec, RunSpec, TaskSpec
from tests.conftest import SMALL, Bench

pytestmark = pytest.mark.filterwarnings("default")  # TRL and its dependencies deprecate things among themselves


def fixed_batch(bench: Bench, rl: RLSpec) -> tuple[Any, Run, Batch]:
    """One recorded step whose old and reference log-probabilities are moved away from the policy's."""
    spec = RunSpec(weights="test", task=TaskSpec(), rl=rl, mode="replay", steps=1, seed=0)
    run = Run(spec, bench.folder, lambda _record: None, bench.tape)
    ctx = next(iter(run.contexts()))
    batch = run.stages.prompts(ctx)
    batch = run.stages.old_logprobs(ctx, run.stages.advantage(ctx, batch))
    generator = torch.Generator().manual_seed(1)

    def moved(values: torch.Tensor) -> torch.Tensor:
        return values + 0.4 * torch.randn(values.shape, generator=generator)

    advantages = torch.randn(len(batch), generator=generator)
    assert batch.old_logprobs is not None
    return (
        ctx,
        run,
        batch.with_(
            old_logprobs=moved(batch.old_logprobs),
            ref_logprobs=moved(batch.old_logprobs) if rl.beta else None,
            advantages=advantages,
        ),
    )


def ours(ctx: Any, run: Run, batch: Batch) -> dict[str, float]:
    (mini,) = batch.mini_batches(1)
    losses, forwards = [], []
    for micro in mini.split(ctx.rl.micro_batches):
        forwards.append(run.stages.logprobs(ctx, micro))
        losses.append(run.stages.loss(ctx, forwards[-1]))
        run.stages.backward(ctx, run.stages.scale(ctx, losses[-1]))
    grads = run.stages.reduce(ctx, mini)
    mask = [f.batch.response_mask.bool() for f in forwards]
    found = {
        "loss": float(sum(x.value.detach() for x in losses)),
        "grad_norm": float(global_norm(grads.named)),
        "entropy": float(torch.cat([f.entropy[m] for f, m in zip(forwards, mask, strict=True)]).mean()),
    }
    for name in ("clipped", "kl"):
        if name in losses[0].terms:
            found[name] = float(torch.cat([x.terms[name][m] for x, m in zip(losses, mask, strict=True)]).mean())
    return found


def theirs(folder: Path, batch: Batch, rl: RLSpec, tmp_path: Path, **settings: Any) -> dict[str, float]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    parts = rl.micro_batches
    args = GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to=[],
        beta=rl.beta,
        epsilon=rl.clip_low,
        epsilon_high=rl.clip_high,
        delta=rl.dual_clip,
        temperature=rl.temperature,
        loss_type="dapo" if rl.aggregation == "token_mean" else "grpo",
        router_aux_loss_coef=rl.aux_coef,
        per_device_train_batch_size=len(batch) // parts,
        gradient_accumulation_steps=parts,
        num_generations=batch.group_size,
        activation_checkpointing=False,
        use_bias_correction_kl=False,  # on by default in TRL: weights the KL term by the ratio, as verl's GRPO does not
        **settings,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if rl.beta:  # TRL makes its reference from the folder's name
        model.config._name_or_path = str(folder)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["1+1="] * 4}),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = parts
    responses = batch.response_mask.shape[1]
    total = torch.zeros(())
    for micro in batch.split(parts):
        inputs = {
            "prompt_ids": micro.tokens[:, :-responses],
            "prompt_mask": micro.attention_mask[:, :-responses],
            "completion_ids": micro.tokens[:, -responses:],
            "completion_mask": micro.response_mask.long(),
            "advantages": micro.advantages,
            "old_per_token_logps": micro.old_logprobs,
            "ref_per_token_logps": micro.ref_logprobs,
            "num_items_in_batch": batch.response_mask.sum(),
        }
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        total += loss.detach()
    metrics = trainer._metrics["train"]
    tokens = torch.tensor([float(m.response_mask.sum()) for m in batch.split(parts)])

    def overall(name: str) -> float:
        """Mean over tokens of what TRL logs per micro-batch."""
        return float((torch.tensor(metrics[name]) * tokens).sum() / tokens.sum())

    grads = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    found = {"loss": float(total), "grad_norm": float(global_norm(grads)), "entropy": overall("entropy")}
    if rl.beta:
        found["kl"] = overall("kl")
    if "importance_sampling_level" not in settings:  # at sequence level TRL counts sequences, we count tokens
        found["clipped"] = overall("clip_ratio/region_mean")
    return found


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"beta": 0.0}, {}),
        ({"beta": 0.1}, {}),
        ({"beta": 0.1, "micro_batches": 1}, {}),
        ({"beta": 0.1, "micro_batches": 4}, {}),
        ({"beta": 0.05, "clip_low": 0.1, "clip_high": 0.3}, {}),
        ({"beta": 0.05, "dual_clip": 1.5}, {}),
        ({"beta": 0.05, "temperature": 1.0}, {}),
        ({"beta": 0.05, "aggregation": "sequence_mean"}, {}),
        ({"beta": 0.05, "aux_coef": 0.5}, {}),
        ({"beta": 0.0, "aux_coef": 0.5, "aggregation": "sequence_mean"}, {}),
        (
            {"beta": 0.05, "algorithm": "gspo", "aggregation": "sequence_mean"},
            {"importance_sampling_level": "sequence"},
        ),
    ],
    ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items()) or "plain",
)
def test_step_agrees_with_trl(bench: Bench, tmp_path: Path, changes: dict[str, Any], settings: dict[str, Any]) -> None:
    rl = RLSpec.model_validate(SMALL.model_dump() | {"updates_per_rollout": 1} | changes)
    ctx, run, batch = fixed_batch(bench, rl)
    mine = ours(ctx, run, batch)
    oracle = theirs(bench.folder, batch, rl, tmp_path, **settings)
    for name, value in oracle.items():
        assert mine[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert {"loss", "grad_norm", "entropy"} <= set(oracle)
    assert abs(mine["loss"]) > 1e-3  # the comparison is about something
