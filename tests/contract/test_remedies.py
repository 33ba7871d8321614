"""Remedies against their faults on the tiny model, and neutral where nothing is wrong."""

from __future__ import annotations

import math

import pytest
import torch

from harness.catalogue import find, find_remedy, remedies, remedy_for
from harness.errors import UsageError
from harness.seams import Schedule
from harness.trace import Trace, first_difference
from tests.conftest import Bench

ONSET = Schedule(1)
STEPS = 4


def arms(bench: Bench, fault: str, remedy: str, **options: float) -> tuple[Trace, Trace, Trace]:
    """Return (clean, faulted, remedied) traces in replay."""
    wrong = find(fault).ref(options, ONSET)
    clean, _ = bench.run("replay", steps=STEPS)
    faulted, _ = bench.run("replay", wrong, steps=STEPS)
    remedied, fired = bench.run("replay", wrong, find_remedy(remedy).ref(schedule=ONSET), steps=STEPS)
    assert fired == STEPS - 1 or remedy == "fp32_grad_norm"
    return clean, faulted, remedied


def late(trace: Trace, metric: str) -> float:
    value = trace.column(metric)[-1]
    assert value is not None
    return value


def test_fp32_grad_norm_gives_the_clean_run_back(bench: Bench) -> None:
    clean, faulted, remedied = arms(bench, "grad_overflow", "fp32_grad_norm", multiplier=1e9)
    assert late(faulted, "grad_norm") == math.inf
    assert late(faulted, "update_norm") == 0.0
    assert first_difference(clean, remedied) is None


def test_resync_gives_the_clean_run_back(bench: Bench) -> None:
    clean, faulted, remedied = arms(bench, "stale_rollout_weights", "resync")
    assert late(faulted, "logprob_gap") > 100 * late(clean, "logprob_gap")
    assert first_difference(clean, remedied) is None


def test_skipping_stops_a_run_that_would_be_lost(bench: Bench) -> None:
    _, _, remedied = arms(bench, "bf16_ratio_exp_overflow", "nonfinite_step_skipped")
    assert late(remedied, "update_norm") == 0.0
    assert late(remedied, "skipped_steps") == 2.0
    assert math.isfinite(late(remedied, "entropy"))


def test_fault_and_remedy_fall_asleep_together_and_leave_the_clean_stage(bench: Bench) -> None:
    from harness.contract import changes, snapshot

    seen: dict[str, object] = {}
    stages: list[object] = []

    def inspect(run: object) -> None:
        prompts = run.stages.prompts

        def watched(ctx: object) -> object:
            stages.append(run.stages.sync)
            return prompts(ctx)

        run.stages.prompts = watched
        seen.update(run=run, before=snapshot(run), sync=run.stages.sync)

    briefly = Schedule(1, until=2)
    refs = [find("stale_rollout_weights").ref(schedule=briefly), find_remedy("resync").ref(schedule=briefly)]
    trace, _ = bench.run("replay", *refs, steps=STEPS, inspect=inspect)
    assert [s is seen["sync"] for s in stages] == [True, False, True, True]
    assert changes(seen["before"], snapshot(seen["run"])) == []
    assert first_difference(trace, bench.run("replay", steps=STEPS)[0]) is None


@pytest.mark.parametrize("name", ["fp32_grad_norm", "nonfinite_step_skipped", "resync"])
def test_neutral_on_a_healthy_run(name: str, bench: Bench) -> None:
    clean, _ = bench.run("replay", steps=STEPS)
    remedied, fired = bench.run("replay", find_remedy(name).ref(schedule=ONSET), steps=STEPS)
    assert fired == STEPS - 1
    assert first_difference(clean, remedied) is None


class Probe:
    """A context and a forward pass of one sequence with three tokens, to see what reaches the small functions."""

    def __init__(self, old: list[float], rollout: list[float]) -> None:
        from types import SimpleNamespace

        from harness.rl.grpo import clipped_surrogate, kl_k3, token_ratio

        self.ops = SimpleNamespace(surrogate=clipped_surrogate, kl=kl_k3, ratio=token_ratio)
        self.batch = SimpleNamespace(
            old_logprobs=torch.tensor([old]),
            rollout_logprobs=torch.tensor([rollout]),
            response_mask=torch.ones(1, len(old)),
        )

    def replacing(self, **ops: object) -> dict[str, object]:
        return ops


def seen(name: str, probe: Probe, **options: float) -> dict[str, object]:
    """Return the small functions with which a remedy calls the loss."""
    return find_remedy(name).factory(lambda ctx, forward: ctx, **options)(probe, probe)


def test_truncated_weights_are_the_probability_ratio_up_to_the_cap() -> None:
    from harness.spec import RLSpec

    probe = Probe([-1.0, -1.0, -1.0], [-1.0, -1.0 + math.log(2), -1.0 - math.log(5)])
    ones = torch.ones(1, 3)
    loss, _ = seen("truncated_importance_sampling", probe, cap=2.0)["surrogate"](ones, ones[:, :1], RLSpec())
    torch.testing.assert_close(loss, -torch.tensor([[1.0, 0.5, 2.0]]))
    loss, _ = seen("masked_importance_sampling", probe, low=0.6, high=2.0)["surrogate"](ones, ones[:, :1], RLSpec())
    assert loss.tolist() == [[-1.0, -0.0, -0.0]]


def test_sequence_ratio_is_the_geometric_mean() -> None:
    ratio = seen("gspo_sequence_ratio", Probe([0.0], [0.0]))["ratio"]
    found = ratio(torch.tensor([[0.0, math.log(8.0), 9.0]]), torch.zeros(1, 3), torch.tensor([[1.0, 1.0, 0.0]]))
    torch.testing.assert_close(found, torch.full((1, 3), math.sqrt(8.0)))


def test_clamped_kl_is_exact_inside_and_finite_outside() -> None:
    from harness.rl.grpo import kl_k3

    kl = seen("kl_log_ratio_clamped", Probe([0.0], [0.0]), bound=10.0)["kl"]
    logprobs = torch.tensor([[-1.0, -2.5, -200.0]], requires_grad=True)
    ref = torch.tensor([[-1.5, -2.0, -1.0]])
    found = kl(logprobs, ref)
    assert torch.equal(found[:, :2], kl_k3(logprobs, ref)[:, :2])
    assert found[0, 2].item() == pytest.approx(math.exp(10.0) - 10.0 - 1.0)
    found.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0, 2].item() == 0.0
    unclamped = torch.tensor([[-200.0]], requires_grad=True)
    kl_k3(unclamped, torch.tensor([[-1.0]])).sum().backward()
    assert unclamped.grad is not None
    assert not unclamped.grad.isfinite().all()


def test_remedies_are_found_and_named() -> None:
    assert set(remedies()) >= {"truncated_importance_sampling", "fp32_grad_norm", "resync", "gspo_sequence_ratio"}
    assert remedy_for(find("grad_overflow")) == "fp32_grad_norm"
    assert remedy_for(find("actor_update_omitted")) is None
    with pytest.raises(UsageError, match="did you mean 'resync'"):
        find_remedy("resink")
