from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from harness.catalogue import find
from harness.seams import Schedule
from harness.trace import Trace, read_jsonl
from tests.conftest import SMALL, Bench

FOLDER = Path(__file__).parent
BENCH = Bench(FOLDER / "checkpoint", FOLDER / "tape.safetensors")


def deviations(trace: Trace) -> dict[tuple[str, int], float]:
    """Deviation from the golden trace in units of the tolerance, by metric and step."""
    golden = read_jsonl(FOLDER / "clean-replay.jsonl")
    tolerance = json.loads((FOLDER / "tolerance.json").read_text())
    assert golden.steps == trace.steps
    assert golden.metrics == trace.metrics
    found = {}
    for name in golden.metrics:
        for step, (a, b) in enumerate(zip(golden.column(name), trace.column(name), strict=True)):
            assert a is not None
            assert b is not None
            found[name, step] = abs(a - b) / tolerance[name][step]
    return found


def test_the_clean_engine_gives_the_golden_trace() -> None:
    trace, _ = BENCH.run("replay", steps=4)
    worst = max(deviations(trace).items(), key=lambda item: item[1])
    assert worst[1] <= 1.0, f"{worst[0]} deviates by {worst[1]:.3g} tolerances"


@pytest.mark.parametrize("fault", ["rmsnorm_no_fp32_upcast", "kl_sign_flipped", "loss_mean_over_microbatches"])
def test_the_tolerance_is_tight_enough_to_see_a_fault(fault: str) -> None:
    trace, _ = BENCH.run("replay", find(fault).ref(schedule=Schedule(0)), steps=4)
    assert max(deviations(trace).values()) > 10


def test_the_tolerance_sees_a_learning_rate_that_is_one_percent_off() -> None:
    trace, _ = BENCH.run("replay", steps=4, rl=SMALL.model_copy(update={"lr": SMALL.lr * 1.01}))
    found = deviations(trace)
    assert max(found.values()) > 10
    assert all(math.isfinite(v) for v in found.values())
