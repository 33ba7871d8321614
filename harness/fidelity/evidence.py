"""What is known about one metric of one model, seed by seed, before it is given a name.

S seeds, T steps from onset on; a leading dimension B is a batch of resamples of the seeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from harness.fidelity import noise as n
from harness.fidelity.align import Bools, Floats
from harness.fidelity.metrics import Metric, Mode, Thresholds

Ints = npt.NDArray[np.int64]
WHICH = (None, "nan", "inf", "-inf", "zero", "constant")
COHERENCE = 0.5
ALIKE_T = 4.0
ALIKE_SHARE = 0.5


@dataclass(frozen=True)
class Evidence:
    """What is known about one metric of one model, seed by seed, from onset on.

    Attributes:
        response: Faulted minus clean on the clean scale, NaN where either is not finite: ``[S, T]``.
        struck: 0, or the index in ``WHICH`` of the non-finite value that only the faulted arm has: ``[S, T]``.
        frozen: First step (index) of a long constant stretch, T if there is none: ``[S]``.
        frozen_at_zero: Whether that constant is zero: ``[S]``.
        roughness: Log ratio of the faulted to the clean step-to-step spread: ``[S]``.
        gain: What the clean and the faulted arm gain from the first to the last third, on the clean scale.
        noise: The null spread.
        scale: The clean scale.
        margin: Largest response that does not matter.
        detected: Whether the response leaves the null spread.
        coherent: Whether the seeds respond alike.

    The last two are judged once, on all seeds: a resample that repeats a seed would find it alike with itself.
    """

    response: Floats
    struck: Ints
    frozen: Ints
    frozen_at_zero: Bools
    roughness: Floats
    gain: tuple[float, float]
    noise: n.Noise
    scale: n.Scale
    margin: float
    detected: bool
    coherent: bool


def gather(
    metric: Metric, clean: Floats, faulted: Floats, null: Floats, log: bool, mode: Mode, unit: float, t: Thresholds
) -> Evidence:
    """Collect the evidence on one metric of one model.

    Args:
        metric: Its entry in the table.
        clean: Values from onset on, ``[S, T]``.
        faulted: The same of the faulted arms.
        null: The same of the null arms.
        log: True for a metric on a positive scale.
        mode: ``replay`` or ``free``.
        unit: Relative size of a rounding unit of the recorded numbers.
        t: Thresholds.
    """
    quantum = n.quantum_of(clean, faulted, null)
    scale = n.scale_of(clean, log, max(metric.residue, quantum))
    noise = n.noise_of(scale.response(null, clean), mode, scale.resolution(unit, quantum))
    response = scale.response(faulted, clean)
    kind = np.where(np.isnan(faulted), 1, np.where(faulted > 0, 2, 3))
    struck = np.where(n.struck(faulted, clean, null), kind, 0)
    frozen = np.array([_frozen(*rows, metric.still) for rows in zip(faulted, clean, null, strict=True)])
    last = np.minimum(frozen, faulted.shape[1] - 1)
    rough = [_roughness(f, c) for f, c in zip(faulted, clean, strict=True)]
    return Evidence(
        response=response,
        struck=struck,
        frozen=frozen,
        frozen_at_zero=(faulted[np.arange(len(frozen)), last] == 0) & (frozen < faulted.shape[1]),
        roughness=np.array(rough),
        gain=(_gain(clean, scale), _gain(faulted, scale)),
        noise=noise,
        scale=scale,
        margin=t.margin(log),
        detected=detected(response, noise, t),
        coherent=_coherent(response),
    )


def _frozen(faulted: Floats, clean: Floats, null: Floats, still: float) -> int:
    """Return where the longest constant stretch begins if it covers half of the steps and its twins move there."""
    steps = len(faulted)
    if not np.isfinite(faulted).all():
        return steps
    edges = np.concatenate(([0], np.flatnonzero(np.abs(np.diff(faulted)) > still) + 1, [steps]))
    longest = int(np.argmax(np.diff(edges)))
    a, b = int(edges[longest]), int(edges[longest + 1])
    moving = min(float(np.mean(np.abs(np.diff(x[a:b])) > still)) if b - a > 1 else 0.0 for x in (clean, null))
    return a if b - a >= max(4, steps // 2) and moving >= 0.75 else steps


def _roughness(faulted: Floats, clean: Floats) -> float:
    both = np.isfinite(faulted) & np.isfinite(clean)
    f, c = (float(np.sum(np.diff(np.clip(x[both], -1e150, 1e150)) ** 2)) for x in (faulted, clean))
    return 0.5 * math.log(f / c) if f > 0 and c > 0 and math.isfinite(f / c) and f / c > 0 else 0.0


def _gain(values: Floats, scale: n.Scale) -> float:
    third = max(1, values.shape[1] // 3)
    if not np.isfinite(values).all():
        return math.nan
    first, last = float(values[:, :third].mean()), float(values[:, -third:].mean())
    if scale.log:
        return math.log(last + scale.unit) - math.log(first + scale.unit)
    return (last - first) / scale.unit


def _coherent(response: Floats) -> bool:
    """Whether the seeds respond alike.

    They do if their mean response holds most of the energy (corrected for what chance leaves in it), or if in one of
    the windows every seed's mean has the same sign and either each is at least ``ALIKE_SHARE`` of that seed's root
    mean square (seeds that respond the same way, but not equally strongly), or their mean is ``ALIKE_T`` times its
    standard error, as the scatter within the seeds implies it.
    """
    r = np.nan_to_num(response)
    seeds, steps = r.shape
    energy = float(np.mean(r**2))
    if seeds < 2 or energy == 0:
        return seeds < 2
    share = float(np.mean(r.mean(axis=0) ** 2)) / energy
    if (seeds * share - 1) / (seeds - 1) >= COHERENCE:
        return True
    for window in n.windows(steps):
        part = r[:, window]
        means = part.mean(axis=1)
        rest = part - means.mean()
        error = np.sqrt(np.mean(rest**2) / (seeds * n.independent(rest)))
        steady = np.abs(means) >= ALIKE_SHARE * np.sqrt(np.mean(part**2, axis=1))
        alike = abs(np.sign(means).sum()) == seeds
        if alike and (steady.all() or abs(means.mean()) > ALIKE_T * error):
            return True
    return False


def detected(response: Floats, noise: n.Noise, t: Thresholds) -> bool:
    """Whether a response leaves the null spread in one of three ways.

    In some step, in the median seed, by ``step_units``; in its root mean square over all steps, in the median seed, by
    ``spread_units``; or in its mean over one of the windows, in every seed (of 5 or more: all but a fifth) and with
    one sign, by ``level_units`` of the null spread of such means.
    """
    z = np.nan_to_num(response) / noise.spread
    if (np.median(np.abs(z), axis=0) > t.step_units).any():
        return True
    if np.median(np.sqrt(np.mean(z**2, axis=1))) > t.spread_units:
        return True
    for window, spread in zip(n.windows(z.shape[1]), noise.level, strict=True):
        means = z[:, window].mean(axis=1)
        if np.sort(means * np.sign(means.sum()))[len(means) // 5] > t.level_units * spread:
            return True
    return False


def pooled(e: Evidence, bins: int) -> Evidence:
    """Return the evidence with its steps averaged into at most ``bins`` bins, so that resampling stays cheap."""
    steps = e.response.shape[1]
    if steps <= bins:
        return e
    starts = np.linspace(0, steps, bins, endpoint=False).astype(np.int64)
    lengths = np.diff(np.append(starts, steps))
    spread = np.maximum.reduceat(e.noise.spread, starts)
    return replace(
        e,
        response=np.add.reduceat(np.nan_to_num(e.response), starts, axis=1) / lengths,
        struck=np.maximum.reduceat(e.struck, starts, axis=1),
        frozen=np.where(e.frozen == steps, bins, np.searchsorted(starts, e.frozen, side="right") - 1),
        noise=n.Noise(spread, e.noise.level),
    )
