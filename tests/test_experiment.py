from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from harness import experiment
from harness.arm import entries
from harness.catalogue import find
from harness.errors import UsageError
from harness.fleet import Failure
from harness.pairs import Prepared
from harness.plan import NULL, Planner, Request, plan, severity_probe
from harness.seams import Schedule
from harness.spec import load_pair
from harness.store import Store, StoredRun
from harness.trace import StepRecord, Trace, write_parquet


def request(fault: str, mode: str = "replay", engine: str = "torch", onset: int = 8) -> Request:
    return Request(load_pair("tiny-qwen3-moe"), find(fault).ref(schedule=Schedule(onset)), mode, engine, (0, 1, 2))


def planner(asked: Request, folder: Path) -> Planner:
    models = {name: Prepared(folder / name, name * 8) for name in ("original", "proxy")}
    return Planner(asked, models, Store(folder / "store"))


def test_replay_needs_tapes_and_shares_everything_but_the_faulted_arms(tmp_path: Path) -> None:
    first, second = request("grad_overflow"), request("kl_sign_flipped")
    arms = plan(first, planner(first, tmp_path))
    assert [(a.model, a.condition) for a in arms[:4]] == [("original", c) for c in ("tape", "clean", "null", "faulted")]
    assert len(arms) == 2 * 3 * 4
    tapes = {(a.model, a.seed): a.job.key for a in arms if a.condition == "tape"}
    assert all(a.job.tape == tapes[a.model, a.seed] for a in arms if a.condition != "tape")
    assert all(a.job.record == (a.condition == "tape") for a in arms)
    others = plan(second, planner(second, tmp_path))
    same = {a.job.key for a in arms} & {a.job.key for a in others}
    assert len(same) == 2 * 3 * 3


def test_free_mode_has_no_tape_and_its_clean_arm_is_the_tape_of_replay(tmp_path: Path) -> None:
    free, replay = request("actor_update_omitted", "free"), request("noop")
    arms = plan(free, planner(free, tmp_path))
    assert {a.condition for a in arms} == {"clean", "null", "faulted"}
    assert all(a.job.tape is None for a in arms)
    tapes = {a.job.key for a in plan(replay, planner(replay, tmp_path)) if a.condition == "tape"}
    assert {a.job.key for a in arms if a.condition == "clean"} == tapes
    nulls = [a.job.spec.fault_ref for a in arms if a.condition == "null"]
    assert {n.name for n in nulls if n} == {NULL["free"]}
    assert {n.schedule for n in nulls if n} == {Schedule(8)}


def test_a_configuration_fault_gets_a_second_clean_run_of_its_own(tmp_path: Path) -> None:
    asked = request("deepspeed_clipping_default", engine="deepspeed", onset=0)
    arms = plan(asked, planner(asked, tmp_path))
    twins = [a for a in arms if a.condition == "twin"]
    assert len(twins) == 6
    assert not {a.job.key for a in twins} & {a.job.key for a in arms if a.condition == "clean"}
    assert {a.job.spec.engine for a in arms if a.condition == "tape"} == {"torch"}
    assert {a.job.spec.engine for a in arms if a.condition != "tape"} == {"deepspeed"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request("deepspeed_clipping_default"), "needs the deepspeed engine; add --engine deepspeed"),
        (request("grad_overflow", engine="deepspeed"), "needs stage clip, which engine deepspeed owns"),
        (request("actor_update_omitted", engine="deepspeed"), "needs stage step, which engine deepspeed owns"),
        (request("noop", onset=0), "onset must be at least 1"),
    ],
)
def test_what_cannot_act_is_refused(asked: Request, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        experiment.check(asked, find(asked.fault.name))


def test_a_stage_that_the_tape_answers_for_is_refused_in_replay_but_not_to_a_control() -> None:
    taped = request("null_sampling_changed")  # on the rollout stage
    control = find("null_sampling_changed")
    experiment.check(taped, control)
    fault = dataclasses.replace(control, control=False)
    with pytest.raises(UsageError, match="acts on stage rollout, which only hands on what the tape holds"):
        experiment.check(taped, fault)
    experiment.check(request("null_sampling_changed", "free"), fault)


def test_a_fault_of_a_fused_operator_runs_every_arm_but_the_tape_on_its_side_fused(tmp_path: Path) -> None:
    fused, other, library = (request(n) for n in ("attention_mask_inverted", "gating_weights_detached", "noop"))
    arms = {asked.fault.name: plan(asked, planner(asked, tmp_path)) for asked in (fused, other, library)}
    for arm in arms["attention_mask_inverted"]:
        expected = "library" if arm.condition == "tape" else "reference"
        assert (arm.job.spec.rl.trainer.ops, arm.job.spec.rl.rollout.ops) == (expected, "library")
    keys = {
        name: {c: {a.job.key for a in found if a.condition == c} for c in ("tape", "clean", "null")}
        for name, found in arms.items()
    }
    assert keys["attention_mask_inverted"] == keys["gating_weights_detached"]
    assert keys["noop"]["tape"] == keys["gating_weights_detached"]["tape"]
    assert not keys["noop"]["clean"] & keys["gating_weights_detached"]["clean"]


def stored(folder: Path, values: list[float], name: str = "run") -> StoredRun:
    trace = Trace([StepRecord(i, {"grad_norm": v}) for i, v in enumerate(values)])
    (folder / name).mkdir(parents=True, exist_ok=True)
    write_parquet(trace, folder / name / "trace.parquet")
    return StoredRun(name, folder / name, trace.digest(), 0, {"effective": {"gradient_clipping": values[0]}})


@pytest.mark.parametrize("threshold", [3.0, 100.0, 65536.0, 1.0])
def test_severity_search_finds_the_threshold_to_half_an_octave(tmp_path: Path, threshold: float) -> None:
    asked = request("grad_overflow")
    calls: list[int] = []

    def run(probes: list[Any]) -> dict[str, StoredRun | Failure]:
        calls.append(len(probes))
        results: dict[str, StoredRun | Failure] = {}
        for arm in probes:
            severity = dict(arm.job.spec.fault_ref.options)["multiplier"]
            bad = math.inf if severity >= threshold * (2.0 if arm.model == "proxy" else 1.0) else 1.0
            results[arm.job.key] = stored(tmp_path, [1.0, bad], f"{arm.model}-{severity}")
        return results

    plans = planner(asked, tmp_path)
    found = experiment.severity_to_trip(asked, lambda m, s: severity_probe(asked, plans, m, s), run)
    assert found is not None
    assert found["original"] is not None
    assert threshold <= found["original"] * (1 + 1e-9)
    assert found["original"] < threshold * 2**0.5 * (1 + 1e-9)
    assert found["proxy"] is None if threshold * 2 > 65536 else found["proxy"] == pytest.approx(2 * found["original"])
    assert sum(calls) <= 2 * 7


def test_a_remedy_adds_an_arm_beside_every_faulted_one(tmp_path: Path) -> None:
    from dataclasses import replace

    from harness.catalogue import find_remedy

    plain = request("grad_overflow")
    asked = replace(plain, remedy=find_remedy("fp32_grad_norm").ref(schedule=Schedule(8)))
    arms = plan(asked, planner(asked, tmp_path))
    extra = [a for a in arms if a.condition == "remedied"]
    assert len(arms) == 2 * 3 * 5
    assert [(a.model, a.seed) for a in extra] == [(m, s) for m in ("original", "proxy") for s in range(3)]
    assert {a.job.spec.fault_ref for a in extra} == {asked.fault}
    assert {a.job.spec.remedy_ref for a in extra} == {asked.remedy}
    assert {a.job.key for a in arms} - {a.job.key for a in extra} == {
        a.job.key for a in plan(plain, planner(plain, tmp_path))
    }
    assert entries(extra[0].job.spec, find("grad_overflow")) == [
        (find("grad_overflow"), asked.fault),
        (find_remedy("fp32_grad_norm"), asked.remedy),
    ]
    on_deepspeed = replace(
        request("deepspeed_clipping_default", engine="deepspeed", onset=0), remedy=find_remedy("fp32_grad_norm").ref()
    )
    with pytest.raises(UsageError, match="remedy fp32_grad_norm needs stage clip, which engine deepspeed owns"):
        experiment.check(on_deepspeed, find("deepspeed_clipping_default"))


def test_no_severity_is_searched_where_there_is_none_or_the_onset_is_never_reached(tmp_path: Path) -> None:
    for asked in (request("kl_sign_flipped"), request("grad_overflow", onset=99)):
        assert experiment.severity_to_trip(asked, lambda *_: pytest.fail("probed"), lambda _: {}) is None


def test_twins_that_differ_are_named(tmp_path: Path) -> None:
    asked = request("deepspeed_clipping_default", engine="deepspeed", onset=0)
    arms = {(a.model, a.condition, a.seed): a for a in plan(asked, planner(asked, tmp_path))}
    clean = (arms["original", "clean", 1], stored(tmp_path, [1.0, 2.0], "clean"))
    same = (arms["original", "twin", 1], stored(tmp_path, [1.0, 2.0], "same"))
    other = (arms["original", "twin", 1], stored(tmp_path, [1.0, 2.5], "other"))
    assert experiment.twin_difference((clean, same)) is None
    reason = experiment.twin_difference((clean, other))
    assert reason is not None
    assert "two clean runs of the original at seed 1 differ in grad_norm at step 1" in reason


def test_a_configuration_fault_fired_only_if_the_effective_setting_differs(tmp_path: Path) -> None:
    fault = find("deepspeed_clipping_default")
    clean, same = stored(tmp_path, [1.0, 2.0], "a"), stored(tmp_path, [1.0, 3.0], "b")
    other = stored(tmp_path, [0.5, 3.0], "c")
    assert experiment.fired(fault, same, clean) == 0
    assert experiment.fired(fault, other, clean) == 2
