"""Adding seeds until the verdict is settled: the looks, and the error that looking often must not add."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from harness.errors import UsageError
from harness.experiment import Experiment
from harness.fidelity import DEFAULT, FidelityReport, Thresholds
from harness.plan import Request
from harness.sequential import Look, confidence_per_look, until_decided
from tests.test_experiment import request

SPREAD = 0.1


def judged(asked: Request, verdict: Any, overall: float, ci: tuple[float, float]) -> Experiment:
    report = FidelityReport(verdict, "because", "replay", 8, {"original": 1, "proxy": 1}, overall=overall, ci=ci)
    return Experiment(asked, report, (), (), {}, None, {})


def sampler(truth: float, rng: np.random.Generator, corrected: bool = True) -> Any:
    """Each seed is a normal reading of the true fidelity; the interval is the exact one of a known spread."""
    readings = rng.normal(truth, SPREAD, size=64)

    def run(asked: Request, thresholds: Thresholds) -> Experiment:
        count = len(asked.seeds)
        confidence = thresholds.confidence if corrected else DEFAULT.confidence
        half = norm.ppf(0.5 + confidence / 2) * SPREAD / np.sqrt(count)
        mean = float(readings[:count].mean())
        low, high = mean - half, mean + half
        verdict = "REPRODUCED" if low >= DEFAULT.bar else "PARTIAL" if high < DEFAULT.bar else "INCONCLUSIVE"
        return judged(asked, verdict, mean, (low, high))

    return run


def test_seeds_are_added_one_by_one_until_the_verdict_is_settled() -> None:
    asked = replace(request("grad_overflow"), seeds=(5, 6, 7))
    seen: list[tuple[int, ...]] = []

    def run(now: Request, thresholds: Thresholds) -> Experiment:
        seen.append(now.seeds)
        assert thresholds.confidence == pytest.approx(1 - 0.05 / 4)
        return judged(now, "REPRODUCED" if len(seen) == 3 else "INCONCLUSIVE", 0.8, (0.71, 0.9))

    found = until_decided(asked, 6, run)
    assert seen == [(5, 6, 7), (5, 6, 7, 8), (5, 6, 7, 8, 9)]
    assert found.verdict == "REPRODUCED"
    assert [look.seeds for look in found.looks] == [3, 4, 5]
    assert found.looks[0] == Look(3, "INCONCLUSIVE", 0.8, (0.71, 0.9))


def test_it_gives_up_at_the_budget_and_refuses_one_that_is_too_small() -> None:
    asked = request("grad_overflow")
    found = until_decided(asked, 5, lambda now, _: judged(now, "INCONCLUSIVE", 0.7, (0.5, 0.9)))
    assert found.verdict == "INCONCLUSIVE"
    assert [look.seeds for look in found.looks] == [3, 4, 5]
    with pytest.raises(UsageError, match="--max-seeds 2 is less than the 3 seeds"):
        until_decided(asked, 2, lambda now, _: judged(now, "VOID", 0.7, (0.5, 0.9)))


def test_the_parts_of_the_error_add_up() -> None:
    assert confidence_per_look(0.95, 1) == 0.95
    assert 10 * (1 - confidence_per_look(0.95, 10)) == pytest.approx(0.05)


def test_looking_often_decides_wrongly_no_more_often_than_once() -> None:
    """Truth at the bar: both decisions are wrong, 5% in all are allowed. Uncorrected looks are wrong far more often."""
    asked, draws = request("grad_overflow"), 600

    def wrong(corrected: bool) -> float:
        decided = 0
        for i in range(draws):
            run = sampler(DEFAULT.bar, np.random.default_rng([i, 17]), corrected)
            decided += until_decided(asked, 12, run).verdict != "INCONCLUSIVE"
        return decided / draws

    allowed = 0.05 + 2 * np.sqrt(0.05 * 0.95 / draws)
    assert wrong(True) <= allowed
    assert wrong(False) > 2 * 0.05
