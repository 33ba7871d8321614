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
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.claims import Claim
from harness.fidelity.align import ArmSet, Floats, difference_before_onset, missing, never_fired, observed, stack
from harness.fidelity.evidence import Evidence, gather, pooled
from harness.fidelity.metrics import DEFAULT, METRICS, Mode, Thresholds
from harness.fidelity.noise import inside_margin, interval, usable
from harness.fidelity.report import FidelityReport, Verdict
from harness.fidelity.score import Table, resamples, table, trip_agreement
from harness.fidelity.symptoms import Symptom, Symptoms, describe, holds, summary

__all__ = ["ArmSet", "FidelityReport", "compare", "responses"]

MODELS = ("original", "proxy")
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
        return unscored("INCONCLUSIVE", f"data are missing: {lacking}.")
    metrics = observed(original, proxy, mode)
    sick, metrics = _sick(sets, metrics, onset)
    if sick is not None:
        return unscored("INCONCLUSIVE", sick)
    comparison = _measure(sets, metrics, mode, onset, thresholds)
    rng = np.random.default_rng([seed, 0xF1DE])
    return _report(comparison, sets, severity_to_trip, expects, bootstrap, rng)


@dataclass(frozen=True)
class _Comparison:
    """Both models measured: evidence and symptoms by model and metric, and their agreement (B = 1)."""

    mode: Mode
    onset: int
    thresholds: Thresholds
    evidence: dict[str, dict[str, Evidence]]
    symptoms: dict[str, dict[str, Symptom]]
    table: Table

    @property
    def margins(self) -> dict[str, float]:
        return {m: e.margin for m, e in self.evidence["original"].items()}


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
    sets = {"original": original, "proxy": proxy}
    evidence: dict[str, dict[str, Evidence]] = {model: {} for model in sets}
    for metric in metrics:
        values = {
            model: [stack(part, arms.seeds, metric, onset) for part in (arms.clean, arms.faulted, arms.null)]
            for model, arms in sets.items()
        }
        log = METRICS[metric].positive and not any((v < 0).any() for three in values.values() for v in three)
        for model, (clean, faulted, null) in values.items():
            evidence[model][metric] = gather(
                METRICS[metric], clean, faulted, null, log, mode, sets[model].resolution, thresholds
            )
    return evidence


def _measure(sets: dict[str, ArmSet], metrics: tuple[str, ...], mode: Mode, onset: int, t: Thresholds) -> _Comparison:
    evidence = responses(sets["original"], sets["proxy"], metrics, mode=mode, onset=onset, thresholds=t)
    found: dict[str, dict[str, Symptoms]] = {model: {} for model in sets}
    symptoms: dict[str, dict[str, Symptom]] = {model: {} for model in sets}
    for model, arms in sets.items():
        steps = tuple(s for s in next(iter(arms.clean.values())).steps if s >= onset)
        everyone = np.arange(len(arms.seeds))[None]
        for metric, e in evidence[model].items():
            found[model][metric] = describe(e, everyone, t)
            symptoms[model][metric] = summary(e, found[model][metric], steps, t)
    margins = {m: e.margin for m, e in evidence["original"].items()}
    return _Comparison(mode, onset, t, evidence, symptoms, table(found["original"], found["proxy"], margins, t))


def _resampled(c: _Comparison, count: int, rng: np.random.Generator) -> Table:
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


def _undecided(c: _Comparison) -> list[str]:
    """Metrics in which one model shifts or drifts, and the other does not, but might.

    It might if its 90% interval reaches half of the size, or if its null spread would hide a shift of that size.
    """
    names = []
    for metric in c.table.metrics:
        pair = [c.symptoms[model][metric] for model in MODELS]
        silent = [s.kind == "none" for s in pair]
        if silent[0] == silent[1]:
            continue
        loud, quiet = pair[silent.index(False)], c.evidence[MODELS[silent.index(True)]][metric]
        if loud.kind in ("level_shift", "drift"):
            low, high = interval(quiet.response)
            reach = float(np.max(high)) if loud.sign > 0 else -float(np.min(low))
            blind = c.thresholds.level_units * float(quiet.noise.level[0] * np.median(quiet.noise.spread))
            size = abs(quiet.scale.unsize(loud.size))
            if not (reach < size / 2 and blind < size):
                names.append(metric)
    return names


def _scores(
    c: _Comparison, trip: float | None, bootstrap: int, rng: np.random.Generator
) -> tuple[float, tuple[float, float], list[str]]:
    """Overall fidelity, its interval, and the undecided metrics.

    The interval has the percentile bootstrap's width on either side of its median, laid around the fidelity itself: a
    resample repeats seeds, hence is noisier than the sample, and noise only lowers agreement. Its upper end is that
    of the case in which every undecided metric agrees.
    """
    t = c.thresholds
    undecided = _undecided(c)

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
    c: _Comparison,
    sets: dict[str, ArmSet],
    severity: tuple[float | None, float | None] | None,
    expects: Sequence[Claim],
    bootstrap: int,
    rng: np.random.Generator,
) -> FidelityReport:
    trip = None if severity is None else trip_agreement(severity)
    responds = any(s.kind != "none" for s in c.symptoms["original"].values())
    overall, ci, undecided = _scores(c, trip, bootstrap, rng) if responds else (None, None, [])
    if overall is None or ci is None:
        verdict, reason = _without_response(c)
    else:
        verdict, reason = _decide(c, overall, ci, undecided)
    agreement, weight = c.table.agreement[:, 0], c.table.weight[:, 0]
    o, p = c.symptoms["original"], c.symptoms["proxy"]
    both = [m for m in c.table.metrics if o[m].onset is not None and p[m].onset is not None]
    return FidelityReport(
        verdict=verdict,
        reason=reason,
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
        claims=tuple(_claim(claim, c) for claim in expects),
        details={
            "bar": c.thresholds.bar,
            "seeds": {model: len(arms.seeds) for model, arms in sets.items()},
            "undecided": undecided,
            "units": {m: "log ratio" if e.scale.log else "clean spread" for m, e in c.evidence["original"].items()},
            "margins": c.margins,
        },
    )


def _claim(claim: Claim, c: _Comparison) -> dict[str, Any]:
    row: dict[str, Any] = {"claim": str(claim)}
    for model in MODELS:
        symptom = c.symptoms[model].get(claim.metric)
        row[model] = None if symptom is None else holds(claim, symptom, c.thresholds)
    return row


def _without_response(c: _Comparison) -> tuple[Verdict, str]:
    """NO_EFFECT if every metric of the original was shown to lie inside its margin; else INCONCLUSIVE."""
    evidence = c.evidence["original"]
    inside = {m: inside_margin(e.response, e.margin) for m, e in evidence.items()}
    bounds = {m: interval(e.response) for m, e in evidence.items()}
    reach = {m: float(np.nan_to_num(np.max(np.maximum(-low, high)), nan=np.inf)) for m, (low, high) in bounds.items()}
    worst = max(evidence, key=lambda m: (not inside[m], reach[m] / evidence[m].margin))
    e = evidence[worst]
    low, high = float(bounds[worst][0].min()), float(bounds[worst][1].max())
    spread = e.scale.size(float(np.median(e.noise.spread)))
    where = (
        f"{worst} of the original, the least certain metric, changes by {e.scale.size(low):+.3g} to "
        f"{e.scale.size(high):+.3g} ({_unit(e)}, 90% interval, null spread {spread:.2g}) from step {c.onset} on"
    )
    if all(inside.values()):
        return "NO_EFFECT", f"every metric of the original stays inside its margin: {where}; margin {e.margin:g}."
    return "INCONCLUSIVE", (
        f"the original shows no response, but that there is none is not shown: {where}, beyond the margin {e.margin:g}."
    )


def _unit(e: Evidence) -> str:
    return "log ratio" if e.scale.log else "clean step-to-step spreads"


def _decide(c: _Comparison, overall: float, ci: tuple[float, float], undecided: list[str]) -> tuple[Verdict, str]:
    t = c.thresholds
    low, high = ci
    verdict: Verdict
    if low >= t.bar:
        verdict, rule = "REPRODUCED", f"the lower end reaches the bar {t.bar:.2f}"
    elif high >= t.bar:
        verdict, rule = "INCONCLUSIVE", f"the interval straddles the bar {t.bar:.2f}"
    elif overall >= t.partial:
        verdict, rule = "PARTIAL", f"between {t.partial:.2f} and the bar {t.bar:.2f}"
    else:
        verdict, rule = "NOT_REPRODUCED", f"below {t.partial:.2f}"
    share = np.array([t.primary_weight if METRICS[m].primary else 1 - t.primary_weight for m in c.table.metrics])
    agreement = c.table.agreement[:, 0]
    credit = c.table.weight[:, 0] * share * (agreement if verdict == "REPRODUCED" else 1 - agreement)
    metric = c.table.metrics[int(np.argmax(credit))]
    told = "; ".join(f"{model} {_tell(c, model, metric)}" for model in MODELS)
    noisy = f"; too noisy to tell in {', '.join(undecided)}" if undecided and verdict == "INCONCLUSIVE" else ""
    return verdict, (
        f"fidelity {overall:.2f} [{low:.2f}, {high:.2f}], {rule}{noisy}; "
        f"{metric} decides with {agreement[int(np.argmax(credit))]:.2f}: {told}."
    )


def _tell(c: _Comparison, model: str, metric: str) -> str:
    s, e = c.symptoms[model][metric], c.evidence[model][metric]
    if s.kind == "none":
        return f"does not respond ({s.size:+.3g} {_unit(e)}, null spread {s.null_spread:.2g})"
    if s.kind == "nonfinite":
        return f"becomes {s.which} at step {s.onset}, where its clean and null twins are finite"
    kind = f"{s.which} value" if s.kind == "frozen" else s.kind.replace("_", " ")
    return f"shows a {kind} from step {s.onset} ({s.size:+.3g} {_unit(e)}, null spread {s.null_spread:.2g})"
