"""Seeds are added one by one until the verdict is settled, without the error of looking often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.experiment import Experiment
    from harness.fidelity import Thresholds
    from harness.plan import Request


@dataclass(frozen=True)
class Look:
    """One look at the data on the way to a decision.

    Attributes:
        seeds: Seeds per model so far.
        verdict: The verdict at this look.
        overall: Fidelity; None if it was not scored.
        ci: Its interval at the confidence of every look.
    """

    seeds: int
    verdict: str
    overall: float | None
    ci: tuple[float, float] | None


def confidence_per_look(confidence: float, looks: int) -> float:
    """Return the confidence that each of several looks needs so that all of them together have a given one.

    The error is spent in equal parts (Bonferroni): whatever the looks' dependence, the chance that any of them decides
    wrongly is at most the sum of the parts.
    """
    return 1 - (1 - confidence) / looks


def until_decided(request: Request, most: int, run: Callable[[Request, Thresholds], Experiment]) -> Experiment:
    """Run an experiment, and add one seed after the other while its verdict is INCONCLUSIVE.

    Args:
        request: The experiment with the seeds to start from.
        most: Seeds at which it is given up.
        run: Runs a request and compares at given thresholds; arms that are stored are not run again.

    Returns:
        The last experiment, with every look.

    Raises:
        UsageError: If ``most`` is less than the number of seeds to start from.
    """
    from harness.fidelity import DEFAULT

    first = request.seeds[0]
    start = len(request.seeds)
    if most < start:
        raise UsageError(f"--max-seeds {most} is less than the {start} seeds to start from")
    confidence = confidence_per_look(DEFAULT.confidence, most - start + 1)
    thresholds = replace(DEFAULT, confidence=confidence)
    looks: list[Look] = []
    for count in range(start, most + 1):
        experiment = run(replace(request, seeds=tuple(range(first, first + count))), thresholds)
        report = experiment.report
        score, ci = (None, None) if report is None else (report.overall, report.ci)
        looks.append(Look(count, experiment.verdict, score, ci))
        if experiment.verdict != "INCONCLUSIVE":
            break
    return replace(experiment, looks=tuple(looks))
