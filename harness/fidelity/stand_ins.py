"""Stand-ins for the arms that other people's runs lack, so that those runs can be compared by the same rules.

A log has no null arm, and mostly no clean twin. What stands in for them says less than the real thing, and every
comparison that used a stand-in carries the sentence that says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.fidelity.align import ArmSet, difference_before_onset
from harness.fidelity.metrics import DEFAULT, METRICS, Thresholds
from harness.fidelity.report import FidelityReport
from harness.fidelity.verdict import compare
from harness.trace import Trace

LEAST = 4
"""Fewest steps before the onset that say how a run behaves by itself."""

Runs = Mapping[int, Trace]


@dataclass(frozen=True)
class Observed:
    """Runs of one model as they were found.

    Attributes:
        faulted: Runs that show the trouble, by seed.
        clean: Their healthy twins, empty if there are none.
        null: A/A controls, empty if there are none.
        onset: Step at which the trouble begins.
    """

    faulted: Runs
    clean: Runs
    null: Runs
    onset: int


def judge(original: Observed, proxy: Observed, thresholds: Thresholds = DEFAULT) -> tuple[FidelityReport, list[str]]:
    """Compare runs of which some arms are missing.

    With clean twins a run is compared with its twin, otherwise with its own stretch before the onset, which is weaker:
    whatever changes in a healthy run, too, is then taken for a response. With fewer seeds than a verdict needs the
    report shows what there is, and is INCONCLUSIVE.

    Returns:
        The report, and what its reader must know; where the onsets differ, steps count from each model's own.
    """
    said: dict[str, None] = {}
    least = thresholds.min_seeds
    short = min(len(o.faulted) for o in (original, proxy)) < least
    sets = []
    for model, o in (("original", original), ("proxy", proxy)):
        arms = _with_twins(model, o, least, said) if o.clean else _with_own_past(model, o, least, said)
        sets.append(arms)
    if original.onset == proxy.onset and all(o.clean and o.null for o in (original, proxy)):
        report = compare(sets[0], sets[1], mode="free", onset=original.onset, thresholds=thresholds)
    else:
        a, b = _alike(_from(sets[0], original.onset), _from(sets[1], proxy.onset))
        report = compare(a, b, mode="free", onset=0, thresholds=thresholds)
        if original.onset == proxy.onset:
            report = _moved(report, original.onset)
    if short:
        have = min(len(o.faulted) for o in (original, proxy))
        leaning = report.verdict
        reason = f"{have} of the {least} seeds that a verdict needs; on these it would be {leaning}: {report.reason}"
        details = {**report.details, "without_doubt": leaning, "seeds": have}
        report = replace(report, verdict="INCONCLUSIVE", reason=reason, ci=None, details=details)
    return report, list(said)


def _with_twins(model: str, o: Observed, least: int, said: dict[str, None]) -> ArmSet:
    seeds = sorted({*o.faulted} & {*o.clean})
    said[f"whether the fault ran in the {model} is not known from its logs"] = None
    clean, faulted = {s: o.clean[s] for s in seeds}, {s: o.faulted[s] for s in seeds}
    if o.null:
        return ArmSet(clean, faulted, {s: o.null[s] for s in seeds if s in o.null}, dict.fromkeys(seeds, 1))
    apart = difference_before_onset(model, ArmSet(clean, faulted, {}, {}), o.onset)
    if apart is None:
        said[f"the {model} has no null arm: its own change from one step to the next stands for it"] = None
    else:
        said[f"{apart}; what the two differ by before the onset stands for a null arm"] = None
    null = {s: _drifted(clean[s], faulted[s] if apart else None, o.onset) for s in seeds}
    after = [{s: t.window(o.onset, 2**62) for s, t in runs.items()} for runs in (clean, faulted, null)]
    return _repeated(ArmSet(after[0], after[1], after[2], {}), least)


def _drifted(clean: Trace, twin: Trace | None, onset: int) -> Trace:
    """Return a run that left its twin as far as the two were apart before the onset, or by one step."""
    columns: dict[str, list[float | None]] = {}
    for metric in clean.metrics:
        values = clean.column(metric)
        known: list[tuple[float, float]] = []
        if twin is not None:
            there = dict(zip(twin.steps, twin.column(metric), strict=True))
            pairs = ((v, there.get(s)) for s, v in zip(clean.steps, values, strict=True) if s < onset)
            known = [
                (v, t) for v, t in pairs if v is not None and t is not None and math.isfinite(v) and math.isfinite(t)
            ]
        if len(known) < LEAST:
            columns[metric] = [*values[1:], values[-2] if len(values) > 1 else values[-1]]
        elif metric in METRICS and METRICS[metric].positive and all(min(pair) > 0 for pair in known):
            columns[metric] = [v if v is None else v * _ratio(known[i % len(known)]) for i, v in enumerate(values)]
        else:
            columns[metric] = [v if v is None else v + _gap(known[i % len(known)]) for i, v in enumerate(values)]
    return Trace.from_columns(clean.steps, columns)


def _ratio(pair: tuple[float, float]) -> float:
    return pair[1] / pair[0]


def _gap(pair: tuple[float, float]) -> float:
    return pair[1] - pair[0]


def _with_own_past(model: str, o: Observed, least: int, said: dict[str, None]) -> ArmSet:
    """Let the stretch before the onset, gone through again and again, stand for the clean twin and for the null arm."""
    said[
        "without clean twins each run is compared with its own stretch before the onset: a weaker answer, since what a "
        "healthy run does over time is taken for a response as well"
    ] = None
    arms = ArmSet({}, {}, {}, {})
    clean, faulted, null = {}, {}, {}
    for seed, trace in o.faulted.items():
        before, after = trace.window(0, o.onset), trace.window(o.onset, 2**62)
        if len(before) < LEAST:
            said[f"the {model} has {len(before)} steps before its onset at step {o.onset}; {LEAST} are needed"] = None
            return arms
        metrics = [m for m in METRICS if None not in (*before.column(m), *after.column(m))]
        faulted[seed] = Trace.from_columns(after.steps, {m: after.column(m) for m in metrics})
        clean[seed], null[seed] = (_round(before, after.steps, metrics, k) for k in (0, 1 + len(before) // 2))
    return _repeated(ArmSet(clean, faulted, null, {}), least)


def _round(stretch: Trace, steps: tuple[int, ...], metrics: list[str], shift: int) -> Trace:
    """Return a stretch gone through again and again, from its step ``shift`` on."""
    columns: dict[str, list[float | None]] = {}
    for metric in metrics:
        values = stretch.column(metric)
        columns[metric] = [values[(i + shift) % len(values)] for i in range(len(steps))]
    return Trace.from_columns(steps, columns)


def _repeated(arms: ArmSet, least: int) -> ArmSet:
    """Repeat the seeds there are until the comparison measures; the caller then never lets the verdict stand."""
    seeds = arms.seeds
    count = max(least, len(seeds)) if seeds else 0
    parts = [{n: a[seeds[n % len(seeds)]] for n in range(count)} for a in (arms.clean, arms.faulted, arms.null)]
    return ArmSet(parts[0], parts[1], parts[2], dict.fromkeys(range(count), 1))


def _from(arms: ArmSet, onset: int) -> ArmSet:
    """Return the arms from the onset on, which becomes step 0."""

    def part(runs: Runs) -> dict[int, Trace]:
        inside = {s: t.window(onset, 2**62) for s, t in runs.items()}
        return {
            s: Trace.from_columns([at - onset for at in t.steps], {m: t.column(m) for m in t.metrics})
            for s, t in inside.items()
        }

    return replace(arms, clean=part(arms.clean), faulted=part(arms.faulted), null=part(arms.null))


def _alike(a: ArmSet, b: ArmSet) -> tuple[ArmSet, ArmSet]:
    """Cut both models to the metrics that both have: what only one of them logs cannot be compared."""
    held = [{m for _, _, t in arms.arms() for m in t.metrics} for arms in (a, b)]
    both = held[0] & held[1]

    def part(runs: Runs) -> dict[int, Trace]:
        return {
            s: Trace.from_columns(t.steps, {m: t.column(m) for m in t.metrics if m in both}) for s, t in runs.items()
        }

    cut = [replace(x, clean=part(x.clean), faulted=part(x.faulted), null=part(x.null)) for x in (a, b)]
    return cut[0], cut[1]


def _moved(report: FidelityReport, onset: int) -> FidelityReport:
    """Count the steps of a report as the logs do."""
    symptoms = {
        model: {m: replace(s, onset=None if s.onset is None else s.onset + onset) for m, s in found.items()}
        for model, found in report.symptoms.items()
    }
    return replace(report, onset=onset, symptoms=symptoms)
