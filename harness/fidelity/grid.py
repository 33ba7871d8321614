"""The steps and metrics that uneven traces have in common, so that they can be scored although they cannot pass.

Traces of unequal length, with holes, or logged at different intervals are never filled in or cut silently. What all
arms hold is compared and shown; the verdict is INCONCLUSIVE and names what is missing (``align.missing``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np
import numpy.typing as npt

from harness.fidelity.align import ArmSet
from harness.fidelity.metrics import METRICS, Mode, Thresholds
from harness.trace import Trace

LEAST_SHARE = 0.5
"""Share of the longest arm's steps from onset on that all arms must hold for a score to mean anything."""


def shared(original: ArmSet, proxy: ArmSet, mode: Mode, onset: int, t: Thresholds) -> tuple[ArmSet, ArmSet] | None:
    """Cut all arms of two models to the steps at which every one of them holds every metric that all recorded.

    Returns:
        The two models on one grid of steps; None if arms or seeds are missing, if no primary metric is recorded by
        all arms, or if fewer than ``min_steps`` or less than half of the steps from onset on are left.
    """
    sets = (original, proxy)
    for arms in sets:
        if not ({*arms.clean} == {*arms.faulted} == {*arms.null}) or len(arms.seeds) < t.min_seeds:
            return None
    traces = [trace for arms in sets for _, _, trace in arms.arms()]
    everywhere = set.intersection(*({*trace.metrics} for trace in traces))
    metrics = [m for m, spec in METRICS.items() if m in everywhere and spec.observable(mode)]
    if not any(METRICS[m].primary for m in metrics):
        return None
    steps = reduce(np.intersect1d, (_complete(trace, metrics) for trace in traces))
    longest = max(sum(step >= onset for step in trace.steps) for trace in traces)
    left = int((steps >= onset).sum())
    if left < max(t.min_steps, LEAST_SHARE * longest):
        return None
    keep = frozenset(steps.tolist())
    return _cut(original, keep, metrics), _cut(proxy, keep, metrics)


def _complete(trace: Trace, metrics: list[str]) -> npt.NDArray[np.int64]:
    present = np.logical_and.reduce([trace.array(m)[1] for m in metrics])
    return np.asarray(trace.steps, dtype=np.int64)[present]


def _cut(arms: ArmSet, keep: frozenset[int], metrics: list[str]) -> ArmSet:
    def part(trace: Trace) -> Trace:
        at = [i for i, step in enumerate(trace.steps) if step in keep]
        columns = {m: trace.column(m) for m in metrics}
        return Trace.from_columns([trace.steps[i] for i in at], {m: [c[i] for i in at] for m, c in columns.items()})

    clean, faulted, null = (
        {seed: part(trace) for seed, trace in one.items()} for one in (arms.clean, arms.faulted, arms.null)
    )
    return replace(arms, clean=clean, faulted=faulted, null=null)


def gap(arms: ArmSet, onset: int) -> tuple[int, int] | None:
    """Return the first two neighbouring steps from onset on between which steps were not recorded; None if none."""
    steps = np.asarray(next(iter(arms.clean.values())).steps, dtype=np.int64)
    steps = steps[steps >= onset]
    holes = np.flatnonzero(np.diff(steps) > 1)
    return None if not holes.size else (int(steps[holes[0]]), int(steps[holes[0] + 1]))
