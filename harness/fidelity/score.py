"""How far two symptoms agree, and how far two models agree over all metrics: 0 to 1.

Agreement in one metric is ``kind x sign x (w_onset onset + w_size size + w_shape shape)``:

* kind: 1 for the same kind, less for kinds that are easily taken for each other (``ALIKE``), 0 if only one responds
  (0.5, without an onset, if that one only scatters: the other may scatter just below its margin);
* sign: 0 for opposite signs, 0.5 if one spread grows and the other shrinks, else 1;
* onset: ``1 - |lag| / (T / 2)``, not below 0, T being the number of steps from onset on;
* size: ``exp(-|log2(size ratio)| / 2)``, so 0.75 at a factor of 1.5, 0.61 at 2, 0.37 at 4;
* shape: mean of the cosine of the two courses and of 1 minus their mean distance after banded dynamic time warping,
  each course divided by its root mean square, neither below 0.

Where the kinds differ, onset, size and shape are those that every kind has: the first step outside the null spread,
and the root mean square over the seeds.

Overall, a metric counts by the larger of its two sizes: not at all up to one margin, fully from ``relevance``
margins on, and in proportion between. It counts a tenth of that where neither model responds in a direction (a spread
change), the root of a tenth where only one of two responses does: any disturbance makes a chaotic run scatter, and
chaos sets the size. Primary metrics have 0.65 of the weight and secondary ones the rest, each in proportion to the
most relevant of them, so that secondary metrics decide when the primary ones are silent.
On the weights: docs/decisions/0011.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.fidelity.align import Floats
from harness.fidelity.evidence import Ints
from harness.fidelity.metrics import METRICS, Thresholds
from harness.fidelity.symptoms import DRIFT, FROZEN, KINDS, NONE, NONFINITE, SHIFT, SPIKE, SPREAD, Symptoms

SHAPE_BINS = 64
OTHER_NONFINITE = 0.8
OPPOSITE_SPREAD = 0.5
LEAST_WEIGHT = 1e-3
"""Weight of a response that barely exceeds its margin, so that a score exists when there is no other."""


def _alike() -> Floats:
    table = np.eye(len(KINDS))
    pairs = {
        (SHIFT, DRIFT): 0.85,
        (SHIFT, FROZEN): 0.7,
        (SHIFT, SPIKE): 0.5,
        (SHIFT, SPREAD): 0.7,
        (DRIFT, SPREAD): 0.7,
        (SPIKE, SPREAD): 0.5,
        (DRIFT, FROZEN): 0.5,
        (DRIFT, SPIKE): 0.4,
        (NONFINITE, SPIKE): 0.3,
        (NONFINITE, SHIFT): 0.3,
        (NONFINITE, DRIFT): 0.3,
        (NONFINITE, SPREAD): 0.2,
        (NONFINITE, FROZEN): 0.2,
        (FROZEN, SPIKE): 0.2,
        (FROZEN, SPREAD): 0.2,
        (SPREAD, NONE): 0.5,
    }
    for (a, b), value in pairs.items():
        table[a, b] = table[b, a] = value
    table[NONE, NONE] = 0.0
    return table


ALIKE = _alike()


def size_agreement(a: Floats, b: Floats) -> Floats:
    """Agreement of two positive sizes on a log scale: 1 if equal, 0 if exactly one is zero."""
    low, high = np.minimum(a, b), np.maximum(a, b)
    ratio = np.divide(low, high, out=np.ones_like(high), where=high > 0)
    return np.where(ratio > 0, np.exp(0.5 * np.log2(np.maximum(ratio, 1e-300))), 0.0)


def warped_distance(a: Floats, b: Floats, band: int) -> Floats:
    """Smallest summed ``|a_i - b_j|`` over monotone alignments with ``|i - j| <= band``, exactly.

    Dynamic time warping with steps (1, 0), (0, 1), (1, 1) (Sakoe and Chiba 1978, doi:10.1109/TASSP.1978.1163055).

    Args:
        a: Courses ``[B, n]``.
        b: Courses ``[B, n]``.
        band: Half-width of the band.

    Returns:
        Distance of each pair: ``[B]``.
    """
    batch, length = a.shape
    before = np.full((length + 1, batch), np.inf)
    before[0] = 0.0
    for i in range(1, length + 1):
        row = np.full((length + 1, batch), np.inf)
        for j in range(max(1, i - band), min(length, i + band) + 1):
            best = np.minimum(np.minimum(before[j - 1], before[j]), row[j - 1])
            row[j] = np.abs(a[:, i - 1] - b[:, j - 1]) + best
        before = row
    return before[length]


def shape_agreement(p: Floats, q: Floats) -> Floats:
    """Agreement of the shapes of two courses ``[B, T]``, whatever their sizes: ``[B]``."""
    p, q = _standard(p), _standard(q)
    length = p.shape[1]
    cosine = np.mean(p * q, axis=1)
    distance = warped_distance(p, q, max(2, length // 8)) / length
    return (np.maximum(cosine, 0.0) + np.maximum(1.0 - distance, 0.0)) / 2


def _standard(course: Floats) -> Floats:
    steps = course.shape[1]
    if steps > SHAPE_BINS:
        starts = np.linspace(0, steps, SHAPE_BINS, endpoint=False).astype(np.int64)
        course = np.add.reduceat(course, starts, axis=1) / np.diff(np.append(starts, steps))
    rms = np.sqrt(np.mean(course**2, axis=1, keepdims=True))
    return np.divide(course, rms, out=np.zeros_like(course), where=rms > 0)


@dataclass(frozen=True)
class Parts:
    """What the agreement in one metric is made of, resample by resample: ``[B]`` each, all 0 to 1.

    Attributes:
        kind: Of the kinds of symptom.
        sign: Of the signs; of which non-finite value, if both have one.
        onset: Of the steps at which they begin.
        size: Of the sizes.
        shape: Of the courses.
    """

    kind: Floats
    sign: Floats
    onset: Floats
    size: Floats
    shape: Floats

    def agreement(self, t: Thresholds) -> Floats:
        """Combine the parts."""
        parts = t.onset_weight * self.onset + t.size_weight * self.size + t.shape_weight * self.shape
        return np.asarray(self.kind * self.sign * parts)

    def first(self) -> dict[str, float]:
        """Return the parts of the first resample."""
        return {name: float(getattr(self, name)[0]) for name in self.__dataclass_fields__}


def parts_of(a: Symptoms, b: Symptoms) -> Parts:
    """Compare the symptoms of two models in one metric."""
    steps = a.profile.shape[1]
    begins = (a.kind != NONE) & (b.kind != NONE)
    other = (a.kind != b.kind) & (a.kind != NONFINITE) & (b.kind != NONFINITE)
    lag = np.abs(np.where(other, a.first - b.first, a.onset - b.onset))
    onset = begins * np.maximum(0.0, 1.0 - lag / max(1.0, steps / 2))
    size = size_agreement(np.where(other, a.power, a.size), np.where(other, b.power, b.size))
    p, q = np.where(other[:, None], a.magnitude, a.profile), np.where(other[:, None], b.magnitude, b.profile)
    both = (a.kind == NONFINITE) & (b.kind == NONFINITE)
    same = np.where(a.which == b.which, 1.0, OTHER_NONFINITE)
    spread = (a.kind == SPREAD).astype(np.int64) + (b.kind == SPREAD)
    opposite = np.where(a.sign * b.sign < 0, np.array([0.0, 1.0, OPPOSITE_SPREAD])[spread], 1.0)
    return Parts(ALIKE[a.kind, b.kind], np.where(both, same, opposite), onset, size, shape_agreement(p, q))


def agreement(a: Symptoms, b: Symptoms, t: Thresholds) -> Floats:
    """Agreement of two models in one metric, resample by resample: ``[B]``."""
    return parts_of(a, b).agreement(t)


def relevance(a: Symptoms, b: Symptoms, margin: float, t: Thresholds) -> Floats:
    """Weight of one metric: 0 at one margin or if neither model responds, 1 at ``relevance`` margins: ``[B]``."""
    size = np.maximum(np.where(a.kind == NONE, 0.0, a.size), np.where(b.kind == NONE, 0.0, b.size))
    weight = np.clip((size / margin - 1.0) / (t.relevance - 1.0), 0.0, 1.0) + LEAST_WEIGHT * (size > 0)
    scatter = (a.kind == SPREAD).astype(np.int64) + (b.kind == SPREAD)
    scatter = np.where((scatter == 1) & ((a.kind == NONE) | (b.kind == NONE)), 2, scatter)
    return weight * t.undirected_weight ** (scatter / 2)


@dataclass(frozen=True)
class Table:
    """Agreement and weight of every metric in every resample: ``[M, B]`` each; the agreement's parts by metric."""

    metrics: tuple[str, ...]
    agreement: Floats
    weight: Floats
    parts: tuple[Parts, ...] = ()

    def overall(self, t: Thresholds) -> Floats:
        """Combine the metrics: ``[B]``, 0 where no metric responds."""
        primary = np.array([METRICS[m].primary for m in self.metrics], dtype=bool)
        total, weight = np.zeros(self.agreement.shape[1]), np.zeros(self.agreement.shape[1])
        for group, share in ((primary, t.primary_weight), (~primary, 1.0 - t.primary_weight)):
            w = self.weight[group]
            if not w.size:
                continue
            strength, sums = share * w.max(axis=0), w.sum(axis=0)
            mean = np.sum(w * self.agreement[group], axis=0) / np.where(sums > 0, sums, 1.0)
            total, weight = total + strength * mean, weight + strength
        return np.divide(total, weight, out=np.zeros_like(total), where=weight > 0)


def table(original: dict[str, Symptoms], proxy: dict[str, Symptoms], margins: dict[str, float], t: Thresholds) -> Table:
    """Compare the two models metric by metric.

    Args:
        original: Symptoms by metric, B resamples each.
        proxy: The same of the proxy.
        margins: Margin of each metric.
        t: Thresholds.
    """
    metrics = tuple(original)
    parts = tuple(parts_of(original[m], proxy[m]) for m in metrics)
    weight = np.stack([relevance(original[m], proxy[m], margins[m], t) for m in metrics])
    return Table(metrics, np.stack([p.agreement(t) for p in parts]), weight, parts)


def resamples(seeds: int, count: int, rng: np.random.Generator) -> Ints:
    """Draw (clean, faulted) units with replacement: indices ``[count, seeds]``."""
    return rng.integers(0, seeds, size=(count, seeds))


def trip_agreement(severity: tuple[float | None, float | None]) -> float | None:
    """Agreement of the severities at which two models trip: on a log scale; 0 if only one does, None if neither."""
    a, b = severity
    if a is None or b is None:
        return None if a is b else 0.0
    return float(size_agreement(np.array([abs(a)]), np.array([abs(b)]))[0])
