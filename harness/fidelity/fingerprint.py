"""Which fault is it? Responses as points, small ones included, and how near one model's lie to another's.

The fidelity score asks whether two models do the same thing that matters, so it leaves out responses below a margin.
Telling faults apart needs them: two numerical faults that both do little differ in *which* metrics stay bit for bit
what they were, and for how many steps. A fingerprint keeps, metric by metric, the size of the response on a log scale
in the steps after onset, and its sign; distances weigh every feature by how far an original and its proxy lie apart in
it when the fault is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.fidelity.align import Floats, stack
from harness.fidelity.evidence import Evidence
from harness.fidelity.metrics import METRICS
from harness.fidelity.signature import Signature

FLOOR = 1e-5
"""Responses below are what rounding leaves: log ratios, or clean spreads."""

EARLY, LATE = 0.01, 0.02
"""Responses from which on a sign is told with confidence, in single steps and in means over steps."""

OVERALL = 0.2
STRUCK = 3.0
"""Weight of a non-finite value beside decades of size."""

SHRINK = 0.05
FEATURES = 12
"""Of each metric; see ``_features``."""


def fingerprint(signature: Signature) -> Floats:
    """Describe a response as a point.

    Args:
        signature: Of one model under one fault.

    Returns:
        ``[len(METRICS) * FEATURES]``, in the order of the table; NaN where the metric is not in the signature.
    """
    rows = []
    for metric, spec in METRICS.items():
        if metric not in signature.metrics:
            rows.append(np.full(FEATURES, np.nan))
            continue
        e, _ = signature.measure(metric, spec.positive and signature.on_a_log_scale(metric))
        response = _unlimited(signature, metric, e)
        frozen = float(np.mean(e.frozen < response.shape[1]))
        rows.append(_features(response, float(np.mean(e.struck > 0)), frozen))
    return np.concatenate(rows)


def _unlimited(signature: Signature, metric: str, e: Evidence) -> Floats:
    """Return the responses without the limit beyond which the score does not tell sizes apart: ``[S, T]``."""
    arms = signature.arms
    clean, faulted = (stack(part, arms.seeds, metric, signature.onset) for part in (arms.clean, arms.faulted))
    with np.errstate(all="ignore"):
        if e.scale.log:
            response = np.log(faulted + e.scale.unit) - np.log(clean + e.scale.unit)
        else:
            response = np.arcsinh((faulted - clean) / e.scale.unit)
    return np.where(np.isfinite(response), response, e.scale.limit)


def _features(response: Floats, struck: float, frozen: float) -> Floats:
    """Features of one metric: ``[S, T] -> [FEATURES]``; stretches that the trace does not reach take its last step."""
    mean, size = response.mean(axis=0), np.sqrt(np.mean(response**2, axis=0))
    steps = len(mean)

    def part(course: Floats, start: int, stop: int | None) -> float:
        first = min(start, steps - 1)
        return float(course[first : max(first + 1, steps if stop is None else min(stop, steps))].mean())

    sizes = [part(size, *s) for s in ((0, 1), (1, 2), (2, 4), (4, 8), (8, None))]
    signs = [
        (part(mean, 0, 1), EARLY),
        (part(mean, 1, 2), EARLY),
        (part(mean, 2, 6), LATE),
        (part(mean, 8, None), LATE),
        (part(mean, 0, None), OVERALL),
    ]
    decades = np.log10(np.array(sizes) + FLOOR)
    return np.array([*decades, *(np.arcsinh(value / unit) for value, unit in signs), STRUCK * struck, frozen])


@dataclass(frozen=True)
class Ruler:
    """Measures how far two fingerprints lie apart.

    Attributes:
        spread: Root mean square distance, by feature, of an original and its proxy under the same fault.
    """

    spread: Floats

    @classmethod
    def fit(cls, pairs: Sequence[tuple[Floats, Floats]]) -> Ruler:
        """Learn what differs between two models although the fault is the same.

        Args:
            pairs: Fingerprints of original and proxy under the same fault, at least two.

        Raises:
            ValueError: If there are fewer than two pairs.
        """
        if len(pairs) < 2:
            raise ValueError(f"a ruler needs at least two faults, seen in both models, not {len(pairs)}")
        apart = np.array([a - b for a, b in pairs])
        seen = np.isfinite(apart)
        square = np.where(seen, apart, 0.0) ** 2
        mean = square.sum(axis=0) / np.maximum(seen.sum(axis=0), 1) / 2
        usual = float(np.median(mean[mean > 0])) if (mean > 0).any() else 1.0
        return cls(np.sqrt(mean + SHRINK * usual))

    def distance(self, a: Floats, b: Floats) -> float:
        """Return the mean distance over the features that both have, in spreads; infinite if there is none."""
        both = np.isfinite(a) & np.isfinite(b)
        return float(np.mean(np.abs(a - b)[both] / self.spread[both])) if both.any() else float("inf")

    def rank(self, observed: Floats, known: Mapping[str, Floats]) -> list[tuple[str, float]]:
        """Rank known responses by their distance to an observed one, the nearest first."""
        found = [(name, self.distance(observed, point)) for name, point in known.items()]
        return sorted(found, key=lambda pair: (pair[1], pair[0]))
