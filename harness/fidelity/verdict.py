"""From the traces of two models to a verdict: the whole comparison, in order.

The order is fixed. VOID: an arm left its clean twin before onset, or the fault did not run. INCONCLUSIVE: data are
missing. NO_EFFECT: the original does not respond, and that is shown (every observable metric inside its margin);
if it is not shown, INCONCLUSIVE. Then the interval of the overall fidelity decides: REPRODUCED if its lower end
reaches the bar, INCONCLUSIVE if only its upper end does, PARTIAL if it lies below the bar but the fidelity reaches the
partial bar, else NOT_REPRODUCED. With the onset at step 0 there is nothing before it that could be compared; the
caller then runs a second clean arm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from harness.claims import Claim
from harness.fidelity.align import ArmSet, Floats, difference_before_onset, missing, never_fired, observed, stack
from harness.fidelity.decide import MODELS, Comparison, claim_row, decide, undecided_metrics, without_response
from harness.fidelity.evidence import Evidence, pooled
from harness.fidelity.grid import gap, shared
from harness.fidelity.metrics import DEFAULT, METRICS, Mode, Thresholds
from harness.fidelity.noise import usable
from harness.fidelity.outlook import attenuation, hidden
from harness.fidelity.report import FidelityReport, Verdict
from harness.fidelity.score import Table, resamples, table, trip_agreement
from harness.fidelity.signature import Signature, agreement
from harness.fidelity.symptoms import Symptom, Symptoms, describe, summary

__all__ = ["ArmSet", "FidelityReport", "compare", "responses"]

RESAMPLING_BINS = 256


def compare(
    original: ArmSet,
    proxy: ArmSet,
    *,
    mode: Mode,
    onset: int,
    thresholds: Thresholds = DEFAULT,
    severity_to_trip: tuple[float | None, float | None] | None = None,
    expects: Sequence[Claim] = (),
    bootstrap: int = 1000,
    seed: int = 0,
) -> FidelityReport:
    """Say whether the proxy reproduces what the fault does to the original.

    Args:
        original: Arms of the original.
        proxy: Arms of the proxy.
        mode: ``replay`` or ``free``.
        onset: Step at which the fault wakes.
        thresholds: Bars, margins and weights.
        severity_to_trip: For a threshold fault, the severity at which the original and the proxy trip.
        expects: Claims of the fault, reported but not scored.
        bootstrap: Number of resamples for the interval.
        seed: Seed of the resampling.

    Returns:
        The report; missing or odd data lead to a verdict, never to an exception.

    Raises:
        ValueError: If mode, onset or bootstrap is not valid.
    """
    if mode not in ("replay", "free") or onset < 0 or bootstrap < 1:
        raise ValueError(f"invalid mode {mode!r}, onset {onset} or bootstrap {bootstrap}")
    sets = {"original": original, "proxy": proxy}

    def unscored(verdict: Verdict, reason: str) -> FidelityReport:
        return FidelityReport(verdict, reason, mode, onset, _fired(sets), severity_to_trip=severity_to_trip)

    void = _void(sets, onset)
    if void is not None:
        return unscored("VOID", void)
    lacking = missing(original, proxy, mode, onset, thresholds)
    if lacking is not None:
        common = shared(original, proxy, mode, onset, thresholds)
        if common is None:
            return unscored("INCONCLUSIVE", f"data are missing: {lacking}.")
        sets = dict(zip(MODELS, common, strict=True))
    metrics = observed(sets["original"], sets["proxy"], mode)
    sick, metrics = _sick(sets, metrics, onset)
    if sick is not None:
        return unscored("INCONCLUSIVE", sick)
    comparison = _measure(sets, metrics, mode, onset, thresholds)
    rng = np.random.default_rng([seed, 0xF1DE])
    report = _report(comparison, sets, severity_to_trip, expects, bootstrap, rng)
    return _with_doubts(report, lacking, gap(sets["original"], onset), expects)


def _with_doubts(
    report: FidelityReport, lacking: str | None, hole: tuple[int, int] | None, expects: Sequence[Claim]
) -> FidelityReport:
    """Turn the verdict into INCONCLUSIVE if data are missing or what was not recorded could change it."""
    doubt = None if lacking is None else f"data are missing: {lacking}; where all arms hold them"
    if doubt is None and hole is not None:
        doubt = hidden(report.verdict, report.symptoms, expects, hole)
    if doubt is None:
        return report
    details = {**report.details, "without_doubt": report.verdict}
    return replace(report, verdict="INCONCLUSIVE", reason=f"{doubt}: {report.reason}", details=details)


def _fired(sets: dict[str, ArmSet]) -> dict[str, int]:
    return {model: sum(arms.fired.values()) for model, arms in sets.items()}


def _void(sets: dict[str, ArmSet], onset: int) -> str | None:
    for model, arms in sets.items():
        found = difference_before_onset(model, arms, onset)
        if found is not None:
            return f"{found}."
    idle = [where for model, arms in sets.items() if (where := never_fired(model, arms)) is not None]
    return f"the fault never fired in the faulted arm of {' and '.join(idle)}." if idle else None


def _sick(sets: dict[str, ArmSet], metrics: tuple[str, ...], onset: int) -> tuple[str | None, tuple[str, ...]]:
    """Leave out metrics that are not finite in healthy runs; say so if that hides a primary or a one-sided one."""
    kept = []
    for metric in metrics:
        bad = [m for m, arms in sets.items() if not usable(stack(arms.clean, arms.seeds, metric, onset))]
        if bad and (METRICS[metric].primary or len(bad) == 1):
            return (
                f"{metric} is not finite in more than half of the clean steps of the {' and the '.join(bad)} "
                f"from step {onset} on, so a response cannot be measured."
            ), ()
        if not bad:
            kept.append(metric)
    return None, tuple(kept)


def _healthy(arms: ArmSet, onset: int) -> dict[str, float]:
    """Mean clean value from onset on of the metrics that the attenuation is predicted from."""
    names = ("topk_mass", "grad_norm", "grad_norm/experts")
    recorded = next(iter(arms.clean.values())).metrics
    return {m: float(np.mean(stack(arms.clean, arms.seeds, m, onset))) for m in names if m in recorded}


def responses(
    original: ArmSet, proxy: ArmSet, metrics: Sequence[str], *, mode: Mode, onset: int, thresholds: Thresholds = DEFAULT
) -> dict[str, dict[str, Evidence]]:
    """Return the responses and null spreads behind a comparison, for plots.

    Args:
        original: Arms of the original; complete, as ``compare`` asks.
        proxy: Arms of the proxy.
        metrics: Metrics of the table that both recorded, as in a report's ``symptoms``.
        mode: ``replay`` or ``free``.
        onset: Step at which the fault wakes.
        thresholds: Bars, margins and weights.

    Returns:
        By model and metric: ``response`` ``[seeds, steps from onset on]``, ``noise.spread`` ``[steps]``, ``margin``.
    """
    pair = _signatures({"original": original, "proxy": proxy}, mode, onset, thresholds)
    scales = {m: all(s.on_a_log_scale(m) for s in pair.values()) for m in metrics}
    return {model: {m: s.measure(m, log)[0] for m, log in scales.items()} for model, s in pair.items()}


def _signatures(sets: dict[str, ArmSet], mode: Mode, onset: int, t: Thresholds) -> dict[str, Signature]:
    return {model: Signature(arms, mode, onset, t) for model, arms in sets.items()}


def _measure(sets: dict[str, ArmSet], metrics: tuple[str, ...], mode: Mode, onset: int, t: Thresholds) -> Comparison:
    pair = _signatures(sets, mode, onset, t)
    evidence: dict[str, dict[str, Evidence]] = {model: {} for model in sets}
    symptoms: dict[str, dict[str, Symptom]] = {model: {} for model in sets}
    steps = tuple(s for s in next(iter(sets["original"].clean.values())).steps if s >= onset)
    for metric in metrics:
        log = all(s.on_a_log_scale(metric) for s in pair.values())
        for model, signature in pair.items():
            e, found = signature.measure(metric, log)
            evidence[model][metric] = e
            symptoms[model][metric] = summary(e, found, steps, t)
    compared = agreement(pair["original"], pair["proxy"], metrics)
    return Comparison(mode, onset, t, evidence, symptoms, compared)


def _resampled(c: Comparison, count: int, rng: np.random.Generator) -> Table:
    found: dict[str, dict[str, Symptoms]] = {}
    for model in MODELS:
        seeds = len(next(iter(c.evidence[model].values())).response)
        draws = resamples(seeds, count, rng)
        distinct, back = np.unique(np.sort(draws, axis=1), axis=0, return_inverse=True)
        back = back.reshape(-1)
        found[model] = {}
        for metric, e in c.evidence[model].items():
            responds = c.symptoms[model][metric].kind != "none"
            s = describe(pooled(e, RESAMPLING_BINS), distinct, c.thresholds, responds)
            found[model][metric] = Symptoms(*(getattr(s, f)[back] for f in s.__dataclass_fields__))
    return table(found["original"], found["proxy"], c.margins, c.thresholds)


def _scores(
    c: Comparison, trip: float | None, bootstrap: int, rng: np.random.Generator
) -> tuple[float, tuple[float, float], list[str]]:
    """Overall fidelity, its interval, and the undecided metrics.

    The interval has the percentile bootstrap's width on either side of its median, laid around the fidelity itself: a
    resample repeats seeds, hence is noisier than the sample, and noise only lowers agreement. Its upper end is that
    of the case in which every undecided metric agrees.
    """
    t = c.thresholds
    undecided = undecided_metrics(c)

    def overall(x: Table, benefit: bool) -> Floats:
        agree = np.where(np.isin(x.metrics, undecided)[:, None] & benefit, 1.0, x.agreement)
        score = Table(x.metrics, agree, x.weight).overall(t)
        return score if trip is None else (1 - t.trip_weight) * score + t.trip_weight * trip

    boot = _resampled(c, bootstrap, rng)
    tail = (1 - t.confidence) / 2
    low, middle = np.quantile(overall(boot, False), [tail, 0.5])
    top, high = np.quantile(overall(boot, True), [0.5, 1 - tail])
    point, best = float(overall(c.table, False)[0]), float(overall(c.table, True)[0])
    return point, (max(0.0, point - float(middle - low)), min(1.0, best + float(high - top))), undecided


def _report(
    c: Comparison,
    sets: dict[str, ArmSet],
    severity: tuple[float | None, float | None] | None,
    expects: Sequence[Claim],
    bootstrap: int,
    rng: np.random.Generator,
) -> FidelityReport:
    trip = None if severity is None else trip_agreement(severity)
    responds = any(s.kind != "none" for s in c.symptoms["original"].values())
    overall, ci, undecided = _scores(c, trip, bootstrap, rng) if responds else (None, None, [])
    decision = without_response(c) if overall is None or ci is None else decide(c, overall, ci, undecided)
    agreement, weight = c.table.agreement[:, 0], c.table.weight[:, 0]
    o, p = c.symptoms["original"], c.symptoms["proxy"]
    both = [m for m in c.table.metrics if o[m].onset is not None and p[m].onset is not None]
    return FidelityReport(
        verdict=decision.verdict,
        reason=decision.reason,
        mode=c.mode,
        onset=c.onset,
        fired=_fired(sets),
        overall=overall,
        ci=ci,
        fidelity={m: float(a) if w > 0 else None for m, a, w in zip(c.table.metrics, agreement, weight, strict=True)},
        symptoms=c.symptoms,
        onset_lags={m: (p[m].onset or 0) - (o[m].onset or 0) for m in both},
        size_ratios={
            m: abs(p[m].size / o[m].size) for m in both if "nonfinite" not in (o[m].kind, p[m].kind) and o[m].size
        },
        weights={m: float(w) for m, w in zip(c.table.metrics, weight, strict=True)},
        severity_to_trip=severity,
        trip_fidelity=trip,
        claims=tuple(claim_row(claim, c) for claim in expects),
        details={
            "bar": c.thresholds.bar,
            "seeds": {model: len(arms.seeds) for model, arms in sets.items()},
            "undecided": undecided,
            "seeds_needed": decision.seeds_needed,
            "parts": {m: p.first() for m, p, w in zip(c.table.metrics, c.table.parts, weight, strict=True) if w > 0},
            "attenuation": attenuation({model: _healthy(arms, c.onset) for model, arms in sets.items()}),
            "units": {m: "log ratio" if e.scale.log else "clean spread" for m, e in c.evidence["original"].items()},
            "margins": c.margins,
        },
    )
