"""The contract of every fault and remedy that can be found; adding one needs no test code."""

from __future__ import annotations

from collections import defaultdict

import pytest

from harness.catalogue import Entry, FaultSpec, catalogue, find, remedies
from harness.contract import STEPS, Workplace, check_fault
from harness.errors import UsageError
from harness.inject import Injection
from harness.mechanism import mechanism
from harness.seams import Schedule, Stage
from harness.trace import first_difference
from tests.conftest import Bench

FAULTS = list(catalogue().values())
EVERY: list[Entry] = [*FAULTS, *remedies().values()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("contract"))


@pytest.mark.parametrize("entry", EVERY, ids=lambda e: e.name)
def test_contract(entry: Entry, place: Workplace) -> None:
    checks = check_fault(entry, place)
    assert [f"{c.name}: {c.sentence}" for c in checks if c.outcome == "fail"] == []
    assert len(checks) >= (7 if entry.config else 11)
    assert sum(c.outcome == "skip" for c in checks) <= (7 if entry.engine or "correction_bias" in entry.needs else 1)


def test_every_fault_is_a_mechanism_of_its_own() -> None:
    same: dict[tuple[str, str], list[str]] = defaultdict(list)
    for fault in FAULTS:
        same[mechanism(fault)].append(fault.name)
    assert [names for names in same.values() if len(names) > 1] == []


def test_names_of_faults_and_remedies_are_apart() -> None:
    assert len({e.name for e in EVERY}) == len(EVERY)


def test_the_fault_that_does_nothing_does_nothing(place: Workplace) -> None:
    trace, fired = place.bench.run("replay", find("noop").ref(schedule=Schedule(1)), steps=STEPS)
    assert fired == 2
    assert first_difference(trace, place.clean(find("noop"))) is None


@pytest.mark.parametrize("name", ["null_weights_nudged", "null_sampling_changed"])
def test_null_controls_change_the_trace(name: str, place: Workplace) -> None:
    null: FaultSpec = find(name)
    trace, _ = place.bench.run(null.mode, null.ref(schedule=Schedule(1)), steps=STEPS)
    assert first_difference(trace, place.clean(null)) is not None


def test_an_engine_that_owns_a_stage_refuses_the_fault_by_name(bench: Bench) -> None:
    def inspect(run: object) -> None:
        run.owned = {Stage.CLIP: "deepspeed"}
        with pytest.raises(UsageError, match=r"needs stage clip, which engine deepspeed owns"):
            Injection(find("grad_overflow"), find("grad_overflow").ref(), run)

    bench.run(steps=1, inspect=inspect)
