"""Do the intervals cover, does the score stay when it should, and does it move when it should?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.benchmarks.fidelity import stages
from experiments.benchmarks.fidelity.bank import Bank, Subject, default_proxy
from experiments.benchmarks.fidelity.rates import Rate
from harness.catalogue import find
from harness.fidelity import compare
from harness.fidelity.align import ArmSet
from harness.fidelity.metrics import METRICS
from harness.fidelity.signature import Signature
from harness.trace import Trace

SIZES = (3, 5, 8)
SUBSETS = 24
TOLERANCE = 0.05
Change = Callable[[Trace, str], Trace]


@dataclass(frozen=True)
class Coverage:
    """Of one fault: its fidelity over all seeds, and per number of seeds how often the interval held it."""

    fault: str
    seeds: int
    truth: float
    covered: Mapping[int, Rate]
    width: Mapping[int, float]


def _part(arms: ArmSet, seeds: Sequence[int]) -> ArmSet:
    parts = {c: {s: getattr(arms, c)[s] for s in seeds} for c in ("clean", "faulted", "null")}
    return replace(arms, **parts, fired={s: arms.fired[s] for s in seeds})


def coverage(bank: Bank, pair: str) -> list[Coverage]:
    """Hold the intervals of subsets of the seeds against the fidelity over all of them.

    The two models' subsets are drawn independently. The truth is an estimate from the same runs, so that subsets of
    half of the seeds cover it a little too often.
    """
    onset, found = bank.pair(Subject(pair)).onset, []
    for name in stages.COVERAGE:
        fault = find(name)
        sets = [_most(bank, subject, fault) for subject in (Subject(pair), default_proxy(pair))]
        if min(len(s.seeds) if s else 0 for s in sets) < 2 * max(SIZES):
            continue
        o, p = (s for s in sets if s is not None)
        whole = compare(o, p, mode=fault.mode, onset=onset, bootstrap=1)
        if whole.overall is None:
            continue
        rng = np.random.default_rng([len(found), 0xC0])
        covered, width = {}, {}
        for size in SIZES:
            hits, widths, drawn = 0, [], 0
            for i in range(SUBSETS):
                parts = [_part(s, sorted(rng.choice(s.seeds, size, replace=False).tolist())) for s in (o, p)]
                report = compare(parts[0], parts[1], mode=fault.mode, onset=onset, bootstrap=400, seed=i)
                if report.ci is None:
                    continue
                drawn += 1
                hits += report.ci[0] - 1e-9 <= whole.overall <= report.ci[1] + 1e-9
                widths.append(report.ci[1] - report.ci[0])
            covered[size] = Rate(hits, drawn)
            width[size] = float(np.mean(widths)) if widths else float("nan")
        found.append(Coverage(name, len(o.seeds), whole.overall, covered, width))
    return found


def _most(bank: Bank, subject: Subject, fault: object) -> ArmSet | None:
    for count in range(len(stages.MANY), 2, -1):
        arms = bank.read(subject, fault, stages.MANY[:count])  # type: ignore[arg-type]
        if arms is not None:
            return arms
    return None


def _scaled(trace: Trace, metric: str) -> Trace:
    return _mapped(trace, metric, lambda x: 7.0 * x)


def _shifted(trace: Trace, metric: str) -> Trace:
    return _mapped(trace, metric, lambda x: x + 3.0)


def _mapped(trace: Trace, metric: str, change: Callable[[float], float]) -> Trace:
    columns = {m: trace.column(m) for m in trace.metrics}
    columns[metric] = [None if v is None else change(v) for v in columns[metric]]
    return Trace.from_columns(list(trace.steps), columns)


def _without(trace: Trace, gone: frozenset[int]) -> Trace:
    at = [i for i, step in enumerate(trace.steps) if step not in gone]
    columns = {m: [trace.column(m)[i] for i in at] for m in trace.metrics}
    return Trace.from_columns([trace.steps[i] for i in at], columns)


def _every(arms: ArmSet, change: Callable[[Trace], Trace]) -> ArmSet:
    parts = {c: {s: change(t) for s, t in getattr(arms, c).items()} for c in ("clean", "faulted", "null")}
    return replace(arms, **parts)


def invariance(pairs: Mapping[str, tuple[ArmSet, ArmSet]], onset: int) -> dict[str, tuple[Rate, list[str]]]:
    """Share of the faults whose fidelity moves by less than 0.05 under a change that means nothing, and the others.

    Args:
        pairs: Arms of original and proxy by fault, in replay.
        onset: Step of the onset.
    """
    moved: dict[str, list[tuple[str, float]]] = {}
    for number, (name, sets) in enumerate(pairs.items()):
        base = compare(*sets, mode="replay", onset=onset, bootstrap=1)
        if base.overall is None:
            continue
        for what, changed in _changes(sets, onset, number, base.symptoms):
            after = compare(*changed, mode="replay", onset=onset, bootstrap=1)
            gap = 1.0 if after.overall is None else abs(after.overall - base.overall)
            moved.setdefault(what, []).append((name, gap))
    return {
        what: (
            Rate(sum(g < TOLERANCE for _, g in gaps), len(gaps)),
            [f"{n} {g:.2f}" for n, g in sorted(gaps, key=lambda x: -x[1]) if g >= TOLERANCE],
        )
        for what, gaps in moved.items()
    }


def _changes(
    sets: tuple[ArmSet, ArmSet], onset: int, number: int, symptoms: Mapping[str, Mapping[str, object]]
) -> list[tuple[str, tuple[ArmSet, ArmSet]]]:
    steps = next(iter(sets[0].clean.values())).steps
    after = [s for s in steps if s >= onset]
    rng = np.random.default_rng([number, 0x1417])
    dropped = frozenset(rng.choice(after[1:], max(1, len(after) // 10), replace=False).tolist())
    halved = frozenset(after[1::2])
    found = [
        ("grad_norm and update_norm times 7", _both(sets, lambda t: _scaled(_scaled(t, "grad_norm"), "update_norm"))),
        ("loss plus 3", _both(sets, lambda t: _shifted(t, "loss"))),
        ("10% of the steps dropped", _both(sets, lambda t: _without(t, dropped))),
    ]
    kinds = {getattr(s, "kind", "none") for by in symptoms.values() for m, s in by.items() if METRICS[m].primary}
    if kinds <= {"none", "level_shift", "drift"}:
        found.append(("every second step, shifts and drifts", _both(sets, lambda t: _without(t, halved))))
    return found


def _both(sets: tuple[ArmSet, ArmSet], change: Callable[[Trace], Trace]) -> tuple[ArmSet, ArmSet]:
    return _every(sets[0], change), _every(sets[1], change)


def monotone(bank: Bank, pair: str) -> dict[str, tuple[float, list[float]]]:
    """Spearman correlation of severity and size of the response, and the sizes, by fault and model.

    The size is the root mean square, over the metrics, of the response in margins (compressed by ``asinh``, since a
    metric that explodes would be the only one that counts).
    """
    from scipy.stats import spearmanr

    onset, found = bank.pair(Subject(pair)).onset, {}
    for name, values in stages.SEVERITIES.items():
        for subject in (Subject(pair), default_proxy(pair)):
            read = [bank.read(subject, find(name), stages.TUNING, severity=v) for v in values]
            sizes = [_extent(Signature(arms, "replay", onset)) for arms in read if arms is not None]
            if len(sizes) == len(values):
                found[f"{name}, {subject.model}"] = (float(spearmanr(values, sizes).statistic), sizes)
    return found


def _extent(signature: Signature) -> float:
    powers = []
    for metric in signature.metrics:
        evidence, symptoms = signature.measure(metric, signature.on_a_log_scale(metric))
        powers.append(np.arcsinh(float(symptoms.power[0]) / evidence.margin))
    return float(np.sqrt(np.mean(np.square(powers))))
