"""Responses on a model's own clean scale, and how far two healthy runs drift apart on that scale.

A response is faulted (or null) minus clean at the same step, seed and model. For a metric on a positive scale it is
the log ratio ``log((x + eps) / (clean + eps))``, eps being 1e-4 of the median clean value, or the metric's rounding
residue if that is more. For any other it is ``asinh(d)``, d being the difference in units of the clean step-to-step
spread ``sqrt(mean(diff(clean)^2) / 2)`` (von Neumann's estimate of the standard deviation, which a slow trend does not
inflate; median over seeds). The inverse hyperbolic sine is d itself for small d and a signed logarithm for large d,
so that no metric is compared on a linear scale once it has left its normal range.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.fidelity.align import Bools, Floats
from harness.fidelity.metrics import Mode

LIMIT = 1e4
"""Responses beyond a factor of 10,000 (so a value that becomes zero) or 10,000 units are off the scale: clipped."""

ROUNDING_UNITS = 4.0
LEAST_SPREAD = 1e-6
USABLE = 0.5


@dataclass(frozen=True)
class Scale:
    """How raw values of one metric and model become responses.

    Attributes:
        log: True for a log ratio, False for a difference over ``unit``.
        unit: Clean step-to-step spread, or the eps of the log ratio, in the metric's own unit.
        level: Median absolute clean value, in the metric's own unit.
    """

    log: bool
    unit: float
    level: float

    def response(self, values: Floats, clean: Floats) -> Floats:
        """Return the response ``[seeds, steps]``; NaN where either value is not finite."""
        usable = np.isfinite(values) & np.isfinite(clean)
        x, c = np.where(usable, values, 0.0), np.where(usable, clean, 0.0)
        if self.log:
            response = np.log(x + self.unit) - np.log(c + self.unit)
        else:
            with np.errstate(over="ignore"):  # values near 1e308 may overflow; the limit catches them
                response = np.arcsinh((x - c) / self.unit)
        return np.where(usable, np.clip(response, -self.limit, self.limit), np.nan)

    @property
    def limit(self) -> float:
        """The largest response that is told apart."""
        return float(np.log(LIMIT) if self.log else np.arcsinh(LIMIT))

    def size(self, response: float) -> float:
        """Return a response as it is reported: the log ratio itself, or units of the clean step-to-step spread."""
        return response if self.log else float(np.sinh(response))

    def unsize(self, size: float) -> float:
        """Undo ``size``."""
        return size if self.log else float(np.arcsinh(size))

    def resolution(self, unit: float, quantum: float = 0.0) -> float:
        """Return what some rounding units, or one decimal place, of the recorded number are worth as a response.

        Args:
            unit: Relative size of one rounding unit.
            quantum: Absolute distance of neighbouring recorded numbers, in the metric's own unit (see ``quantum_of``).
        """
        absolute = ROUNDING_UNITS * unit
        printed = np.log1p(quantum / (self.level + self.unit)) if self.log else np.arcsinh(quantum / self.unit)
        return max(LEAST_SPREAD, absolute if self.log else absolute * self.level / self.unit, float(printed))


MOST_PLACES = 6
LEAST_DISTINCT = 4


def quantum_of(*values: Floats) -> float:
    """Find the decimal place that numbers were rounded to before they were recorded.

    Returns:
        0.1 to 1e-6; 0 if they carry more places than six, are whole numbers (which are exact counts), or are fewer
        than four different ones, so that a coincidence cannot be told from rounding.
    """
    few = np.concatenate([v[:, :64].ravel() for v in values])
    if _places(few[np.isfinite(few)]) is None:  # nearly always, and much cheaper
        return 0.0
    finite = np.unique(np.concatenate([v[np.isfinite(v)].ravel() for v in values]))
    places = _places(finite) if finite.size >= LEAST_DISTINCT and np.abs(finite).max() <= 1e9 else None
    return 10.0**-places if places else 0.0


def _places(values: Floats) -> int | None:
    for places in range(MOST_PLACES + 1):
        scaled = values * 10.0**places
        if (np.abs(scaled - np.round(scaled)) <= 1e-9 * np.maximum(np.abs(scaled), 1.0)).all():
            return places
    return None


def scale_of(clean: Floats, log: bool, residue: float = 0.0) -> Scale:
    """Measure a model's clean scale for one metric.

    Args:
        clean: Clean values from onset on, ``[seeds, steps]``; non-finite ones are left out.
        log: True for a metric on a positive scale.
        residue: What rounding leaves of zero, in the metric's own unit; the least eps of a log ratio.

    Returns:
        The scale. A constant clean metric has no spread: its unit is then 1e-6 of its level, or 1 if that is zero.
    """
    finite = np.abs(clean[np.isfinite(clean)])
    level = float(np.median(finite)) if finite.size else 0.0
    if log:
        eps = 1e-4 * level or 1e-4 * float(finite.max(initial=0.0)) or 1e-7
        return Scale(True, max(eps, residue), level)
    steps = np.diff(clean, axis=1)
    spreads = [float(np.sqrt(np.mean(row[np.isfinite(row)] ** 2) / 2)) for row in steps if np.isfinite(row).any()]
    spread = float(np.median(spreads)) if spreads else 0.0
    return Scale(False, max(spread, 1e-6 * level) or 1.0, level)


@dataclass(frozen=True)
class Noise:
    """How far two healthy runs of one model drift apart in one metric, as responses.

    Attributes:
        spread: Null spread of each step from onset on, never zero: ``[steps]``; inf where the null arm itself is
            not finite.
        level: Null spread, in units of ``spread``, of the mean over all steps and over the later half of them: ``[2]``.
    """

    spread: Floats
    level: Floats


def windows(steps: int) -> tuple[slice, slice]:
    """The two windows over which a lasting response is averaged: all steps, and the later half."""
    return slice(0, steps), slice(steps // 2, steps)


def noise_of(null: Floats, mode: Mode, floor: float) -> Noise:
    """Measure the null spread.

    In ``replay`` the null arm starts one rounding unit away and diverges: the spread of a step is the largest null
    response of any seed so far, times 1 + 3 / seeds, since the largest of few seeds falls short of what one more
    would show. In ``free`` the null arm samples anew: the spread is the root mean square over steps and seeds, at the
    upper end of its one-sided 95% interval (chi-square, as many degrees of freedom as independent steps).

    The spread of a mean over a window is the root mean square of the null seeds' means, but no less than what the
    steps' own spread and autocorrelation imply (see ``independent``): three seeds may agree by chance.

    Args:
        null: Null responses ``[seeds, steps]``; NaN where not finite.
        mode: ``replay`` or ``free``.
        floor: Response that recording resolution alone could cause.
    """
    seeds, steps = null.shape
    size = np.abs(null)
    if mode == "replay":
        worst = np.where(np.isnan(size), np.inf, size).max(axis=0)
        spread = np.maximum.accumulate(worst) * (1 + 3 / seeds)
    else:
        spread = np.where(np.isnan(size).any(axis=0), np.inf, _upper_rms(null))
    spread = np.maximum(spread, floor)
    z = np.where(np.isfinite(null), null, 0.0) / spread
    level = []
    for window in windows(steps):
        part = z[:, window]
        step_rms = 1.0 if mode == "free" else float(np.sqrt(np.mean(part**2)))
        means = float(np.sqrt(np.mean(part.mean(axis=1) ** 2)))
        level.append(max(means, step_rms / np.sqrt(independent(z) * part.shape[1] / steps), 1e-3))
    return Noise(spread, np.array(level))


def _upper_rms(null: Floats) -> float:
    from scipy.stats import chi2

    finite = np.isfinite(null)
    if not finite.any():
        return np.inf
    freedom = null.shape[0] * independent(np.where(finite, null, 0.0))
    return float(np.sqrt(np.mean(null[finite] ** 2) * freedom / chi2.ppf(0.05, freedom)))


def independent(z: Floats) -> float:
    """Number of independent steps, at least 1, that the mean over T autocorrelated ones is worth.

    ``T (1 - r) / (1 + r)`` with the lag-1 autocorrelation r, pooled over seeds, about zero, not below 0.

    Args:
        z: ``[S, T]``.
    """
    power = float(np.sum(z[:, 1:] ** 2))
    r = min(max(float(np.sum(z[:, 1:] * z[:, :-1])) / power, 0.0), 0.99) if power else 0.0
    return max(1.0, z.shape[1] * (1 - r) / (1 + r))


def usable(clean: Floats) -> bool:
    """Say whether a clean metric is finite in at least half of its values."""
    return bool(np.isfinite(clean).mean() >= USABLE)


def inside_margin(response: Floats, margin: float) -> bool:
    """Show that a response is of no importance: two one-sided t tests at 5% over the seeds.

    The 90% interval of the mean over seeds must lie inside +-margin for the mean over all steps and for the mean
    over the later half of them (Schuirmann 1987, doi:10.1007/BF01068419).

    Args:
        response: ``[seeds, steps]``; a NaN is never inside.
        margin: Largest response that does not matter.
    """
    low, high = interval(response)
    return bool((low > -margin).all() and (high < margin).all())


def interval(response: Floats) -> tuple[Floats, Floats]:
    """Return the 90% t interval over seeds of the response's mean in each of the two ``windows``: ``[2]`` each."""
    from scipy.stats import t

    seeds = response.shape[0]
    means = np.stack([response[:, window].mean(axis=1) for window in windows(response.shape[1])])
    half = t.ppf(0.95, seeds - 1) * means.std(axis=1, ddof=1) / np.sqrt(seeds)
    return means.mean(axis=1) - half, means.mean(axis=1) + half


def struck(values: Floats, clean: Floats, null: Floats) -> Bools:
    """Where a value is not finite although its clean and its null twin are: ``[seeds, steps]``."""
    return ~np.isfinite(values) & np.isfinite(clean) & np.isfinite(null)
