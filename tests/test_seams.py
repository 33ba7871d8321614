"""Seams: what they refuse, whose calls they reach, and gradients that are rewritten while values are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from harness.catalogue import FaultSpec
from harness.errors import UsageError
from harness.inject import Injection
from harness.rl import loop
from harness.rl.backward import with_backward
from harness.rl.operators import FunctionSlot, operator_slots
from harness.rl.policy import Policy
from harness.seams import (
    FaultRef,
    Gradients,
    Module,
    Operator,
    Schedule,
    Seam,
    Stage,
    describe_seam,
    places,
)
from harness.spec import SideSpec
from tests.conftest import SMALL, Bench


def passing(clean: Any) -> Any:
    return lambda ctx, *args, **kwargs: clean(*args, **kwargs)


def spec(seam: Seam, factory: Any = passing, name: str = "planted") -> FaultSpec:
    return FaultSpec(name, "other", factory, seam, "replay", (), ())


@pytest.fixture(scope="module")
def quiet(bench: Bench) -> dict[str, Any]:
    """Two steps without a fault: values by metric."""
    return run(bench, None)


def ref(name: str = "planted") -> FaultRef:
    return FaultRef(name, (), Schedule(0))


def test_seams_describe_themselves_and_refuse_unknown_words() -> None:
    assert describe_seam(Operator("rotary", "trainer", "backward")) == "operator rotary (trainer, backward)"
    assert describe_seam(Module("norm")) == "module norm (both)"
    with pytest.raises(ValueError, match="direction 'sideways' does not exist; known: forward, backward"):
        Module("norm", direction="sideways")
    with pytest.raises(ValueError, match="operator 'npu_gelu' does not exist"):
        Operator("npu_gelu")


def test_places_of_both_sides_and_of_a_tuple() -> None:
    assert places(Module("norm")) == ("module norm (trainer, forward)", "module norm (rollout, forward)")
    assert places((Stage.CLIP, Stage.STEP)) == ("stage clip", "stage step")


@pytest.mark.parametrize(
    ("seam", "message"),
    [
        (Stage.ROLLOUT, "acts on stage rollout, but this run replays a tape"),
        (Stage.REWARD, "acts on stage reward, but this run replays a tape"),
        (Operator("npu_swiglu"), "no model on side both runs on the fused operator npu_swiglu"),
        (Operator("grouped_mm", "rollout"), "the model has no grouped_mm operator on side rollout"),
    ],
)
def test_a_seam_that_matches_nothing_is_refused_by_name(seam: Any, message: str, bench: Bench) -> None:
    rl = SMALL.model_copy(update={"rollout": SideSpec(experts="eager")})

    def inspect(run: Any) -> None:
        with pytest.raises(UsageError, match=message):
            Injection(spec(seam), ref(), run)

    bench.run(steps=1, rl=rl, inspect=inspect)


def test_a_tuple_with_one_open_stage_is_not_refused_in_replay(bench: Bench) -> None:
    seam = (Stage.ROLLOUT, Stage.ROLLOUT_LOGPROBS)
    bench.run(steps=1, inspect=lambda run: Injection(spec(seam), ref(), run))


def test_a_model_on_fused_operators_has_these_in_place_of_the_librarys(checkpoint: Any) -> None:
    library, fused = Policy.load(checkpoint, SideSpec()), Policy.load(checkpoint, SideSpec(ops="reference"))
    for kind in ("rotary", "softmax", "grouped_mm"):
        assert len(operator_slots(library, kind)) == 1
        assert operator_slots(fused, kind) == []
    for kind in ("npu_rotary_mul", "npu_moe_gating_top_k_softmax"):
        assert operator_slots(library, kind) == []
        assert len(operator_slots(fused, kind)) == 1
    assert operator_slots(fused, "npu_moe_gating_top_k") == []  # this family's router is the softmax one
    assert operator_slots(fused, "npu_add_rms_norm") == []  # no model calls it
    assert len(operator_slots(fused, "norm")) == len(operator_slots(library, "norm")) == 9


def test_two_faults_on_one_seam_are_an_error_and_a_free_seam_is_not(bench: Bench) -> None:
    def inspect(run: Any) -> None:
        first = Injection(spec(Module("norm", "trainer"), name="first"), ref("first"), run)
        with first:
            with pytest.raises(UsageError, match=r"faults first and second both claim module norm \(trainer, forward"):
                Injection(spec(Module("norm"), name="second"), ref("second"), run).__enter__()
            with Injection(spec(Module("norm", "trainer", "backward")), ref(), run):
                assert len(run.claims) == 2
        assert run.claims == {}

    bench.run(steps=1, inspect=inspect)


def test_a_function_is_replaced_for_one_model_only_and_put_back_after_an_error() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.isnan().any():
                raise RuntimeError("on purpose")
            return nn.functional.softmax(x, dim=-1)

    clean = nn.functional.softmax
    mine, other = Model(), Model()
    slot = FunctionSlot(mine, nn.functional, "softmax")
    x = torch.tensor([0.0, 1.0])
    undo = slot.replace(lambda x, dim: clean(2 * x, dim))
    assert torch.equal(mine(x), clean(2 * x, -1))
    assert torch.equal(other(x), clean(x, -1))
    with pytest.raises(RuntimeError, match="on purpose"):
        mine(x * torch.nan)
    assert nn.functional.softmax is clean
    undo()
    assert "forward" not in vars(mine)
    assert torch.equal(mine(x), clean(x, -1))


def test_rewritten_gradients_leave_values_alone_and_reach_inputs_and_weights() -> None:
    layer = nn.Linear(3, 2, dtype=torch.float64)
    seen: list[Any] = []

    def rewrite(call: Any, *grads: torch.Tensor) -> Gradients:
        seen.append((call.module, len(call.args), [g.tolist() for g in grads]))
        good = call.backward(*grads)
        return Gradients((good.inputs[0] * 2,), {"weight": good.weights["weight"] * 3, "bias": good.weights["bias"]})

    wrapped = with_backward(nn.Linear.forward, rewrite)
    x = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    out = wrapped(layer, x)
    assert torch.equal(out, layer(x))
    assert seen == []
    out.sum().backward()
    assert seen == [(layer, 1, [[[1.0, 1.0]]])]
    torch.testing.assert_close(x.grad, 2 * layer.weight.sum(0, keepdim=True))  # dx = W^T 1
    torch.testing.assert_close(layer.weight.grad, 3 * x.detach().expand(2, 3))  # dW = 1 x^T
    assert layer.bias.grad.tolist() == [1.0, 1.0]
    with torch.no_grad():
        assert torch.equal(wrapped(layer, x), layer(x))
    assert len(seen) == 1


def test_rewritten_gradients_pass_over_integers_lists_keywords_and_plain_results() -> None:
    def forward(
        pair: list[torch.Tensor], *, index: torch.Tensor, power: int
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        return (pair[0] ** power * pair[1])[index], index + 1, None

    a, b = torch.tensor([2.0, 3.0], requires_grad=True), torch.tensor([5.0, 7.0])
    wrapped = with_backward(forward, lambda call, *grads: call.backward(*(10 * g for g in grads)))
    value, shifted, nothing = wrapped([a, b], index=torch.tensor([1]), power=2)
    assert (value.tolist(), shifted.tolist(), nothing) == ([63.0], [2], None)
    value.sum().backward()
    assert a.grad.tolist() == [0.0, 10 * 2 * 3.0 * 7.0]
    assert b.grad is None


@pytest.mark.parametrize(
    "seam",
    [
        Module("norm", "trainer", "backward"),
        Module("attention", "trainer", "backward"),
        Module("router", "trainer", "backward"),
        Operator("attention", "trainer", "backward"),
        Operator("experts", "trainer", "backward"),
        Operator("norm", "trainer", "backward"),
        Operator("rotary", "trainer", "backward"),
        Operator("grouped_mm", "trainer", "backward"),
        Operator("softmax", "trainer", "backward"),
    ],
    ids=describe_seam,
)
def test_a_backward_fault_that_does_nothing_changes_no_value_and_one_that_zeroes_changes_gradients_only(
    seam: Any, bench: Bench, quiet: dict[str, Any]
) -> None:
    def zeroing(clean: Any) -> Any:
        def faulty(ctx: Any, call: Any, *grads: Any) -> Gradients:
            inputs, weights = clean(call, *grads)
            zero = tuple(None if g is None else g * 0 for g in inputs)
            return Gradients(zero, {n: None if g is None else g * 0 for n, g in weights.items()})

        return faulty

    first = run(bench, spec(seam))
    assert first["fired"] == 2
    for name in ("loss", "entropy", "grad_norm", "update_norm"):
        assert first[name] == pytest.approx(quiet[name], rel=1e-5, abs=1e-9), name
    zeroed = run(bench, spec(seam, zeroing))
    assert zeroed["loss"][0] == pytest.approx(quiet["loss"][0], rel=1e-2, abs=1e-4)
    assert zeroed["logprob_gap"][0] == quiet["logprob_gap"][0]
    assert zeroed["grad_norm"][0] != quiet["grad_norm"][0]


@pytest.mark.parametrize("kind", ["attention", "experts", "norm", "rotary", "softmax", "grouped_mm"])
def test_a_forward_fault_reaches_its_side_and_no_other(kind: str, bench: Bench, quiet: dict[str, Any]) -> None:
    def counting(clean: Any) -> Any:
        def faulty(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(torch.is_grad_enabled())
            return clean(*args, **kwargs)

        return faulty

    calls: list[bool] = []
    same = run(bench, spec(Operator(kind, "trainer"), counting))
    assert True in calls
    assert {k: v for k, v in same.items() if k != "fired"} == {k: v for k, v in quiet.items() if k != "fired"}
    calls.clear()
    run(bench, spec(Operator(kind, "rollout"), counting))
    assert set(calls) == {False}  # the rollout never asks for a gradient


def run(bench: Bench, fault: FaultSpec | None) -> dict[str, Any]:
    from harness.rl.run import Run
    from harness.spec import RunSpec, TaskSpec

    records: list[Any] = []
    engine = Run(
        RunSpec(weights="test", task=TaskSpec(), rl=SMALL, mode="replay", steps=2, seed=0),
        bench.folder,
        records.append,
        bench.tape,
    )
    if fault is None:
        loop.run(engine.recorder.stages, engine.recorder.steps(engine.contexts()))
        fired = 0
    else:
        with Injection(fault, ref(), engine) as injection:
            loop.run(engine.recorder.stages, engine.recorder.steps(injection.steps(engine.contexts())))
        fired = injection.fired
    names = records[0].metrics
    return {"fired": fired, **{name: [r.metrics[name] for r in records] for name in names}}
