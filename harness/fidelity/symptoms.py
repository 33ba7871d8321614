"""What a metric does after onset: the symptom of one model in one metric.

Symptoms are found for many resamples of the seeds at once, so the arrays below have a leading batch dimension:
B resamples, S seeds, T steps from onset on. All sizes are responses on the model's own clean scale (see ``noise``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness import claims
from harness.fidelity.align import Bools, Floats
from harness.fidelity.evidence import WHICH, Evidence, Ints
from harness.fidelity.metrics import DEFAULT, METRICS, Thresholds
from harness.fidelity.noise import inside_margin
from harness.trace import to_json_value

KINDS = ("none", "nonfinite", "frozen", "spike", "level_shift", "drift", "spread_change")
NONE, NONFINITE, FROZEN, SPIKE, SHIFT, DRIFT, SPREAD = range(len(KINDS))
SPIKE_SHARE = 0.8
RAMP_GAIN = 0.9
SPREAD_RATIO = math.log(1.25)


@dataclass(frozen=True)
class Symptoms:
    """The symptom in each of B resamples.

    Attributes:
        kind: Index in ``KINDS``: ``[B]``.
        sign: -1, 0 or 1: ``[B]``.
        onset: Index of the step, counted from the onset of the fault: ``[B]``.
        size: Absolute size as a response; ``scale.limit`` if non-finite: ``[B]``.
        which: Index in ``WHICH``: ``[B]``.
        profile: The course whose shape is compared: mean response; root mean square of the response for a spread
            change; share of seeds that are non-finite: ``[B, T]``.
        power: Root mean square of the response over seeds and steps, whatever the kind: ``[B]``.
        magnitude: Root mean square of the response over seeds, whatever the kind: ``[B, T]``.
        first: First step (index) in which the median seed leaves the null spread, whatever the kind: ``[B]``.
    """

    kind: Ints
    sign: Ints
    onset: Ints
    size: Floats
    which: Ints
    profile: Floats
    power: Floats
    magnitude: Floats
    first: Ints


@dataclass(frozen=True)
class Symptom:
    """What one metric of one model does after onset.

    Attributes:
        kind: One of ``KINDS``.
        sign: -1, 0 (not directed) or 1.
        onset: Step at which it begins; None for kind "none".
        size: Signed: log ratio, or units of the clean step-to-step spread; inf, -inf or nan if non-finite.
        null_spread: Median null spread from the onset of the symptom on, in the unit of the size.
        confidence: Share of the seeds that show it; for "none" 1 if it was shown to lie inside the margin, else 0.
        which: "nan", "inf" or "-inf" if non-finite; "zero" or "constant" if frozen.
        gain: Change of the clean and of the faulted arm from the first to the last third after onset.
    """

    kind: str
    sign: int
    onset: int | None
    size: float
    null_spread: float
    confidence: float
    which: str | None
    gain: tuple[float, float]

    @property
    def null_units(self) -> float:
        """Absolute size in units of the null spread."""
        return abs(self.size) / self.null_spread if math.isfinite(self.size) else math.inf

    def to_dict(self) -> dict[str, Any]:
        """Return the symptom as JSON data."""
        return {
            "kind": self.kind,
            "sign": self.sign,
            "onset": self.onset,
            "size": to_json_value(self.size),
            "null_spread": to_json_value(self.null_spread),
            "null_units": to_json_value(self.null_units),
            "confidence": self.confidence,
            "which": self.which,
            "gain": [to_json_value(g) for g in self.gain],
        }


def change_points(mean: Floats) -> tuple[Ints, Floats, Ints, Floats]:
    """Search exactly for the best single change of a response that is zero before it.

    With suffix sums, the least squares of all T candidates cost O(T): a level from step k on explains
    ``(sum_{t>=k} r_t)^2 / m`` of the energy, a ramp ``(sum_{t>=k} (t-k+1) r_t)^2 / (m (m+1) (2m+1) / 6)``, m = T - k.

    Args:
        mean: Mean responses ``[B, T]``.

    Returns:
        Step (index) and explained energy of the best level, then of the best ramp: ``[B]`` each.
    """
    m = np.arange(mean.shape[1], 0, -1, dtype=np.float64)
    suffix = np.cumsum(mean[:, ::-1], axis=1)[:, ::-1]
    weighted = np.cumsum(suffix[:, ::-1], axis=1)[:, ::-1]
    level = suffix**2 / m
    ramp = weighted**2 / (m * (m + 1) * (2 * m + 1) / 6)
    at_level, at_ramp = level.argmax(axis=1), ramp.argmax(axis=1)
    rows = np.arange(len(mean))
    return at_level, level[rows, at_level], at_ramp, ramp[rows, at_ramp]


def _spike(mean: Floats) -> Bools:
    """Whether up to an eighth of the steps hold nearly all energy of a mean response, which then comes back."""
    steps = mean.shape[1]
    few = max(1, steps // 8)
    power = mean**2
    top = np.partition(power, steps - few, axis=1)[:, steps - few :]
    return np.asarray((top.sum(axis=1) >= SPIKE_SHARE * power.sum(axis=1)) & (power[:, -1] < power.max(axis=1) / 4))


def describe(e: Evidence, seeds: Ints, t: Thresholds, responds: bool | None = None) -> Symptoms:
    """Find the symptom in each resample.

    Args:
        e: The evidence.
        seeds: Indices of seeds, ``[B, S]``.
        t: Thresholds.
        responds: Whether the metric responds at all, if that was settled on all seeds; None to settle it here, by
            the margin, for each resample.
    """
    rows = np.arange(len(seeds))
    r = np.nan_to_num(e.response)[seeds]
    z = r / e.noise.spread
    steps = r.shape[2]
    hit = np.median(np.abs(z), axis=1) > t.step_units
    mean = r.mean(axis=1)
    finite = np.where(np.isfinite(e.noise.spread), e.noise.spread, 0.0)
    power = np.sqrt(np.maximum(np.mean(np.mean(r**2, axis=1) - finite**2, axis=1), 0.0))
    magnitude = np.sqrt(np.mean(r**2, axis=1))
    first = np.where(hit.any(axis=1), hit.argmax(axis=1), 0)
    if e.coherent:
        at_level, gain_level, at_ramp, gain_ramp = change_points(mean)
        left = np.sum(mean**2, axis=1)
        drift = (left - gain_ramp < RAMP_GAIN * (left - gain_level)) & (steps - at_ramp >= 3)
        spike = _spike(mean)
        peak = np.abs(mean).argmax(axis=1)
        kind = np.where(spike, SPIKE, np.where(drift, DRIFT, SHIFT))
        onset = np.where(spike, peak, np.where(drift, at_ramp, at_level))
        suffix = np.cumsum(mean[:, ::-1], axis=1)[:, ::-1]
        shift = suffix[rows, at_level] / (steps - at_level)
        end = mean[:, -max(1, steps // 3) :].mean(axis=1)
        signed = np.where(spike, mean[rows, peak], np.where(drift, end, shift))
        size, sign, profile = np.abs(signed), np.sign(signed).astype(np.int64), mean
    else:
        kind = np.full(len(seeds), SPREAD)
        onset = first
        change = e.roughness[seeds].mean(axis=1)
        sign = np.where(np.abs(change) > SPREAD_RATIO, np.sign(change), 0).astype(np.int64)
        size, profile = power, magnitude
    nothing = (size < e.margin) | (not e.detected) if responds is None else np.full(len(seeds), not responds)
    kind = np.where(nothing, NONE, kind)
    found = Symptoms(
        kind, np.where(nothing, 0, sign), onset, size, np.zeros_like(kind), profile, power, magnitude, first
    )
    return _nonfinite(e, seeds, _freeze(e, seeds, found))


def _freeze(e: Evidence, seeds: Ints, s: Symptoms) -> Symptoms:
    """Put the frozen symptom where more than half of the seeds freeze."""
    steps = e.response.shape[1]
    if (e.frozen == steps).all():
        return s
    first = e.frozen[seeds]
    is_frozen = np.asarray((first < steps).mean(axis=1) > 0.5)
    onset = _lower_median(first, steps)
    mean = np.nan_to_num(e.response)[seeds].mean(axis=1)
    suffix = np.cumsum(mean[:, ::-1], axis=1)[:, ::-1]
    at = np.minimum(onset, steps - 1)
    signed = suffix[np.arange(len(seeds)), at] / (steps - at)
    zero = e.frozen_at_zero[seeds].mean(axis=1) > 0.5
    return replace(
        s,
        kind=np.where(is_frozen, FROZEN, s.kind),
        sign=np.where(is_frozen, np.sign(signed).astype(np.int64) * (np.abs(signed) >= e.margin), s.sign),
        onset=np.where(is_frozen, onset, s.onset),
        size=np.where(is_frozen, np.maximum(np.abs(signed), e.margin), s.size),
        which=np.where(is_frozen, np.where(zero, 4, 5), s.which),
        profile=np.where(is_frozen[:, None], mean, s.profile),
    )


def _nonfinite(e: Evidence, seeds: Ints, s: Symptoms) -> Symptoms:
    """Put the non-finite symptom wherever any seed has it: it never happens by chance."""
    if not e.struck.any():
        return s
    steps = e.response.shape[1]
    struck = e.struck > 0
    first = np.where(struck.any(axis=1), struck.argmax(axis=1), steps)
    code = e.struck[np.arange(len(first)), np.minimum(first, steps - 1)]
    counts = np.stack([(code[seeds] == c).sum(axis=1) for c in (1, 2, 3)])
    which = counts.argmax(axis=0) + 1
    is_struck = np.asarray((first[seeds] < steps).any(axis=1))
    return replace(
        s,
        kind=np.where(is_struck, NONFINITE, s.kind),
        sign=np.where(is_struck, np.choose(which - 1, (0, 1, -1)), s.sign),
        onset=np.where(is_struck, _lower_median(first[seeds], steps), s.onset),
        size=np.where(is_struck, e.scale.limit, s.size),
        which=np.where(is_struck, which, s.which),
        profile=np.where(is_struck[:, None], struck[seeds].mean(axis=1), s.profile),
    )


def _lower_median(first: Ints, steps: int) -> Ints:
    """Lower median of the entries below ``steps``; ``steps`` if there is none: ``[B, S] -> [B]``."""
    count = (first < steps).sum(axis=1)
    return np.sort(first, axis=1)[np.arange(len(first)), np.maximum(count - 1, 0) // 2]


def summary(e: Evidence, s: Symptoms, steps: tuple[int, ...], t: Thresholds) -> Symptom:
    """Name the symptom that was found on all seeds.

    Args:
        e: The evidence.
        s: Symptoms with B = 1.
        steps: Step numbers from onset on.
        t: Thresholds.
    """
    kind, sign, at, which = int(s.kind[0]), int(s.sign[0]), int(s.onset[0]), WHICH[s.which[0]]
    r = np.nan_to_num(e.response)
    size = e.scale.size(float(s.size[0]) * (sign or 1))
    if kind == NONFINITE:
        size = float(str(which))
    elif kind == NONE:
        size, at = e.scale.size(float(r.mean())), 0
    return Symptom(
        kind=KINDS[kind],
        sign=sign,
        onset=None if kind == NONE else steps[at],
        size=size,
        null_spread=e.scale.size(float(np.median(e.noise.spread[at:]))),
        confidence=_confidence(e, kind, sign, at, t),
        which=which,
        gain=e.gain,
    )


def _confidence(e: Evidence, kind: int, sign: int, at: int, t: Thresholds) -> float:
    r = np.nan_to_num(e.response)
    z = r / e.noise.spread
    if kind == NONE:
        return float(inside_margin(e.response, e.margin))
    if kind == NONFINITE:
        shows = (e.struck > 0).any(axis=1)
    elif kind == FROZEN:
        shows = e.frozen < r.shape[1]
    elif kind == SPIKE:
        shows = z[:, at] * sign > t.step_units
    elif kind == SPREAD:
        shows = np.abs(z).max(axis=1) > t.step_units
    else:
        shows = r[:, at:].mean(axis=1) * sign >= e.margin
    return float(shows.mean())


def holds(claim: claims.Claim, symptom: Symptom, thresholds: Thresholds = DEFAULT) -> bool:
    """Say whether what was measured is what a claim says.

    Args:
        claim: The claim; its metric must be the one that the symptom is of.
        symptom: The measured symptom.
        thresholds: Thresholds of the comparison.

    Returns:
        True if it holds. ``Flat`` holds if the metric is frozen, or gains less than half of a clean gain that is
        itself at least twice the margin.
    """
    lasting = symptom.kind in ("level_shift", "drift", "frozen")
    if isinstance(claim, claims.Falls):
        return symptom.sign < 0 and (lasting or symptom.kind == "nonfinite")
    if isinstance(claim, claims.Rises):
        return symptom.sign > 0 and (lasting or symptom.kind == "nonfinite")
    if isinstance(claim, claims.Shifts):
        return lasting and symptom.sign != 0
    if isinstance(claim, claims.NonFinite):
        return symptom.kind == "nonfinite"
    if isinstance(claim, claims.Spikes):
        return symptom.kind == "spike"
    if isinstance(claim, claims.Scatters):
        return symptom.kind == "spread_change"
    if isinstance(claim, claims.Zero):
        return symptom.which == "zero"
    if isinstance(claim, claims.Stays):
        return symptom.kind == "none"
    if isinstance(claim, claims.Flat):
        clean, faulted = symptom.gain
        positive = claim.metric in METRICS and METRICS[claim.metric].positive
        learns = abs(clean) >= 2 * thresholds.margin(positive)
        return symptom.kind == "frozen" or (learns and abs(faulted) <= abs(clean) / 2)
    raise TypeError(f"no rule for the claim {claim}")
