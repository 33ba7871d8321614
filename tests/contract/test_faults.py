"""The contract of every fault in the catalogue; adding a fault needs no test code."""

from __future__ import annotations

import pickle
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.catalogue import SECTIONS, FaultSpec, catalogue
from harness.claims import Claim
from harness.errors import UsageError
from harness.inject import Injection, rewrite_config
from harness.seams import FaultRef, Schedule, Stage
from harness.trace import first_difference
from tests.conftest import Bench

FAULTS = list(catalogue().values())
WAKING = [f for f in FAULTS if not f.config]
each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
each_waking_fault = pytest.mark.parametrize("fault", WAKING, ids=lambda f: f.name)


class Interrupted(BaseException):
    """Stands for Ctrl-C."""


@each_fault
def test_documentation_has_its_three_parts_and_full_references(fault: FaultSpec) -> None:
    assert fault.summary.endswith((".", "?"))
    assert set(fault.sections) == set(SECTIONS)
    assert all(fault.sections.values())
    assert all(re.fullmatch(r"https://\S+", url) for url in fault.seen_in)
    assert fault.control or fault.seen_in
    assert fault.control or fault.expects
    known = {f.name for f in FAULTS}
    assert set(fault.look_alikes) <= known - {fault.name}


@each_fault
def test_reference_survives_pickling_and_json(fault: FaultSpec) -> None:
    ref = fault.ref(schedule=Schedule(3, until=9, every=2))
    assert pickle.loads(pickle.dumps(ref)) == ref
    assert FaultRef.from_dict(ref.to_dict()) == ref
    for claim in fault.expects:
        assert Claim.from_dict(claim.to_dict()) == claim


@each_fault
def test_unknown_option_is_refused_with_the_nearest_name(fault: FaultSpec) -> None:
    with pytest.raises(UsageError, match="unknown option"):
        fault.ref({"no_such_option": 1})
    for name in fault.defaults:
        with pytest.raises(UsageError, match=rf"did you mean '{name}'"):
            fault.ref({name + "x": 1})


@each_waking_fault
def test_asleep_is_bit_identical_to_clean(fault: FaultSpec, bench: Bench, clean: dict[str, Any]) -> None:
    trace, fired = bench.run(fault.mode, fault.ref(schedule=Schedule(99)))
    assert fired == 0
    assert first_difference(trace, clean[fault.mode]) is None


@each_waking_fault
def test_awake_fires_deterministically_and_not_before_onset(
    fault: FaultSpec, bench: Bench, clean: dict[str, Any]
) -> None:
    ref = fault.ref(schedule=Schedule(2))
    first, fired = bench.run(fault.mode, ref)
    second, _ = bench.run(fault.mode, ref)
    assert fired == 2
    assert first_difference(first, second) is None
    assert first_difference(first.window(0, 2), clean[fault.mode].window(0, 2)) is None


@each_waking_fault
@pytest.mark.parametrize("exit_by", ["end", "error", "interrupt"])
def test_undone_on_every_exit_path(fault: FaultSpec, bench: Bench, exit_by: str) -> None:
    seen: dict[str, Any] = {}

    def snapshot(run: Any) -> dict[str, Any]:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        state: dict[str, Any] = {f"stage {s.value}": run.stages[s] for s in Stage}
        state.update({f"probe {n}": p for n, p in run.probes.items()})
        state["experts registry"] = sorted(ALL_EXPERTS_FUNCTIONS)
        state["attention registry"] = sorted(ALL_ATTENTION_FUNCTIONS)
        for name, policy in run._policies("both"):
            state[f"{name} config"] = policy.model.config.to_json_string()
            for path, module in policy.model.named_modules():
                state[f"{name}:{path} attributes"] = sorted(vars(module))
                state[f"{name}:{path} hooks"] = len(module._forward_hooks) + len(module._forward_pre_hooks)
        return state

    def inspect(run: Any) -> None:
        for _, policy in run._policies("both"):  # the library hangs hooks of its own in at the first such call
            policy.model(input_ids=torch.zeros(1, 2, dtype=torch.int64), output_router_logits=True)
        seen["run"], seen["before"] = run, snapshot(run)
        if exit_by != "end":
            sync = run.stages.sync
            error = RuntimeError if exit_by == "error" else Interrupted

            def breaking(ctx: Any, update: Any) -> None:
                sync(ctx, update)
                if ctx.step == 2:
                    raise error("on purpose")

            run.stages.sync = seen["before"]["stage sync"] = breaking

    # A fault on sync replaces the very stage that would have raised, and so ends in peace.
    raises = exit_by != "end" and fault.seam is not Stage.SYNC
    with pytest.raises((RuntimeError, Interrupted), match="on purpose") if raises else nullcontext():
        bench.run(fault.mode, fault.ref(schedule=Schedule(1)), inspect=inspect)
    after = snapshot(seen["run"])
    assert {k for k, v in seen["before"].items() if after[k] is not v and after[k] != v} == set()


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.config], ids=lambda f: f.name)
def test_configuration_fault_changes_its_key_and_nothing_else(fault: FaultSpec, bench: Bench) -> None:
    config = {"gradient_clipping": 0.2, "zero_optimization": {"stage": 1}}
    before = dict(config)
    new = rewrite_config(fault, fault.ref(), config)
    assert config == before
    key = fault.seam.key
    assert new.get(key) != config.get(key)
    assert {k: v for k, v in new.items() if k != key} == {k: v for k, v in config.items() if k != key}


@each_waking_fault
def test_acts_on_a_checkpoint_with_other_experts(fault: FaultSpec, bench: Bench, tmp_path: Path) -> None:
    from tests.conftest import make_checkpoint

    proxy = Bench(make_checkpoint(tmp_path / "proxy", experts=4, seed=1), bench.tape)
    quiet, _ = proxy.run(fault.mode, steps=2)
    trace, fired = proxy.run(fault.mode, fault.ref(schedule=Schedule(1)), steps=2)
    assert fired == 1
    if fault.name == "noop":
        assert first_difference(trace, quiet) is None
    elif fault.seam is Stage.SYNC or fault.threshold:
        pass  # shows one step later, or only above its threshold: see the tests of each kind
    else:
        assert first_difference(trace, quiet) is not None


def test_an_engine_that_owns_a_stage_refuses_the_fault_by_name(bench: Bench) -> None:
    from harness.catalogue import find

    def inspect(run: Any) -> None:
        run.owned = {Stage.CLIP: "deepspeed"}
        with pytest.raises(UsageError, match=r"needs stage clip, which engine deepspeed owns"):
            Injection(find("grad_overflow"), find("grad_overflow").ref(), run)

    bench.run(steps=1, inspect=inspect)
