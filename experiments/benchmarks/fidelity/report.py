"""The study's result as text, made of whatever arms are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from experiments.benchmarks.fidelity import stages
from experiments.benchmarks.fidelity.bank import Bank, Subject, default_proxy
from experiments.benchmarks.fidelity.calibrate import calibrate
from experiments.benchmarks.fidelity.identify import Bankable, frozen
from experiments.benchmarks.fidelity.intervals import coverage, invariance, monotone
from experiments.benchmarks.fidelity.keeping import by_family, kept, predictors
from experiments.benchmarks.fidelity.matching import Pairwise, area, own_area, pairwise, ranks
from experiments.benchmarks.fidelity.rates import Rate, false_alarms, power
from harness.catalogue import FaultSpec
from harness.fidelity.align import ArmSet, Floats
from harness.fidelity.metrics import DEFAULT
from harness.fidelity.signature import Signature

Sets = dict[str, tuple[ArmSet, ArmSet]]
GROUPS = Path(__file__).with_name("look_alikes.json")


def stored(bank: Bank, pair: str, faults: Sequence[FaultSpec], seeds: Sequence[int]) -> Sets:
    """Arms of original and proxy by fault, where all are stored."""
    found = {}
    for fault in faults:
        sets = [bank.read(subject, fault, seeds) for subject in (Subject(pair), default_proxy(pair))]
        if sets[0] is not None and sets[1] is not None:
            found[fault.name] = (sets[0], sets[1])
    return found


def report(bank: Bank, pair: str) -> str:
    """Write every section whose arms are stored."""
    return "\n".join(_lines(bank, pair)) + "\n"


def _lines(bank: Bank, pair: str) -> Iterator[str]:
    onset = bank.pair(Subject(pair)).onset
    faults = stages.replayed()
    tuning, held = (stored(bank, pair, faults, seeds) for seeds in (stages.TUNING, stages.HELD_OUT))
    yield f"# Calibration study of the fidelity score on {pair}"
    yield f"{len(faults)} replayed faults; {len(tuning)} on the tuning seeds, {len(held)} on the held-out seeds."
    if len(tuning) < 2:
        return
    first = [_signatures(tuning, i, onset) for i in (0, 1)]
    yield from _weights(pairwise(*first))
    bankable = Bankable.of(*first)
    groups = frozen(GROUPS, bankable.names, bankable.distances(bankable.originals))
    yield from _identified("tuning seeds, leave-fault-out", bankable, bankable.originals, groups)
    both = {n: s for n, s in held.items() if n in tuning}
    if len(both) == len(tuning):
        observed = [_signatures(both, i, onset) for i in (0, 1)]
        scores = pairwise(observed[0], first[1])
        yield from _separated("held-out seeds of the original against tuning seeds of the proxy", scores, groups)
        points = Bankable.of(observed[0], first[1]).originals
        yield from _identified("held-out seeds", bankable, points, groups)
        rate, lost = power(first[0], observed[0])
        yield f"Power: of the faults that respond on the tuning seeds, on the held-out ones {rate}; not: {_list(lost)}."
    alarms = false_alarms(bank, pair)
    yield f"False alarms: an effect in {alarms.effect}; by metric {alarms.by_metric}; verdicts {alarms.verdicts}."
    for what, (rate, moved) in invariance(tuning, onset).items():
        yield f"Invariance, {what}: moved by less than 0.05 in {rate}; others: {_list(moved)}."
    for row in coverage(bank, pair):
        told = ", ".join(f"{n} seeds {row.covered[n]}, mean width {row.width[n]:.2f}" for n in row.covered)
        yield f"Coverage, {row.fault} ({row.seeds} seeds: {row.truth:.2f}): {told}."
    growing = monotone(bank, pair)
    for name, (correlation, sizes) in growing.items():
        yield f"Monotone, {name}: Spearman {correlation:+.2f}, sizes {_list([f'{x:.2f}' for x in sizes])}."
    yield from _kept(bank, pair)


def _signatures(sets: Sets, model: int, onset: int) -> dict[str, Signature]:
    return {name: Signature(both[model], "replay", onset) for name, both in sets.items()}


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"


def _weights(scores: Pairwise) -> Iterator[str]:
    found = calibrate(scores)
    yield (
        f"Weights: the chosen ones by leave-fault-out search over {found.tried} settings give an area of "
        f"{found.area:.3f}, the provisional ones {found.provisional:.3f}; gain {found.gain:+.4f} +- {found.error:.4f}."
    )
    matrix = scores.scores()
    own, other = np.diag(matrix), matrix[~np.eye(len(matrix), dtype=bool)]
    yield (
        f"The bar {DEFAULT.bar:.2f} is reached by {Rate(int((own >= DEFAULT.bar).sum()), len(own))} of the matched "
        f"pairs and by {np.mean(other >= DEFAULT.bar):.1%} of the {len(other)} mismatched ones."
    )


def _separated(where: str, pairs: Pairwise, groups: Sequence[int]) -> Iterator[str]:
    scores, label = pairs.scores(), np.asarray(groups)
    apart = label[:, None] != label[None, :]
    names = pairs.names
    twins = sorted(
        ((scores[i, j], names[i], names[j]) for i, j in zip(*np.nonzero(apart), strict=True) if scores[i, j] >= 0.9),
        reverse=True,
    )
    yield (
        f"Separation, {where}: area {area(scores):.3f} over all pairs, {own_area(scores).mean():.3f} of a fault's own "
        f"pair against that fault's mismatched ones; outside the groups {area(scores, apart):.3f} and "
        f"{own_area(scores, apart).mean():.3f}. {len(twins)} of {int(apart.sum())} pairs outside the groups score 0.90 "
        f"or more: {_list([f'{a} / {b} {s:.2f}' for s, a, b in twins[:12]])}."
    )


def _identified(where: str, bankable: Bankable, observed: dict[str, Floats], groups: Sequence[int]) -> Iterator[str]:
    distances = bankable.distances(observed)
    for what, label in (("raw", None), (f"{len(set(groups))} look-alike groups", groups)):
        place = ranks(-distances, label)
        top = [Rate(int((place < k).sum()), len(place)) for k in (1, 3)]
        yield f"Identification, {where}, {what}: top-1 {top[0]}, top-3 {top[1]}."
    wrong = [
        f"{bankable.names[i]} taken for {bankable.names[int(np.argmin(distances[i]))]}"
        for i in np.flatnonzero(ranks(-distances, groups))
    ]
    yield f"Wrong group: {_list(wrong)}."


def _kept(bank: Bank, pair: str) -> Iterator[str]:
    found = kept(bank, pair)
    if len(found) < 2:
        return
    families = by_family(found)
    columns = sorted({f for row in families.values() for f in row})
    yield "| stand-in | ability | faults | mean fidelity | at the bar | " + " | ".join(columns) + " |"
    yield "|---" * (5 + len(columns)) + "|"
    for one in found:
        cells = [f"{families[one.name].get(f, float('nan')):.2f}" for f in columns]
        cells = [
            f"{one.ability:.2f}",
            str(len(one.fidelity)),
            f"{one.mean:.2f}",
            f"{one.passing(DEFAULT.bar):.0%}",
            *cells,
        ]
        yield f"| {one.name} | " + " | ".join(cells) + " |"
    told = ", ".join(f"{name} {value:+.2f}" for name, value in predictors(found).items())
    yield f"Spearman correlation with the mean fidelity over {len(found)} stand-ins: {told}."
    sure = [n for n in found[0].fidelity if all(o.fidelity.get(n, 0.0) >= DEFAULT.bar for o in found)]
    never = [n for n in found[0].fidelity if all(o.fidelity.get(n, 1.0) < DEFAULT.bar for o in found)]
    yield f"Every stand-in reaches the bar: {_list(sure)}. None does: {_list(never)}."
