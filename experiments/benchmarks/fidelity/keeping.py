"""What a proxy must keep: fidelity by stand-in, against how its healthy runs differ from the original's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experiments.benchmarks.fidelity import stages
from experiments.benchmarks.fidelity.bank import Bank, Subject, default_proxy
from harness.catalogue import find
from harness.fidelity.align import ArmSet, stack
from harness.fidelity.metrics import METRICS
from harness.fidelity.signature import Signature, similarity

LEVELS = ("entropy", "topk_mass", "router_entropy", "expert_imbalance", "grad_norm", "kl")


@dataclass(frozen=True)
class Kept:
    """One stand-in.

    Attributes:
        name: Its name.
        fidelity: By fault.
        healthy: Mean absolute log ratio, to the original, of the clean level of each of ``LEVELS``.
        ability: Exact-match rate; NaN if it was not measured.
    """

    name: str
    fidelity: dict[str, float]
    healthy: dict[str, float]
    ability: float

    @property
    def mean(self) -> float:
        """Mean fidelity over the faults."""
        return float(np.mean(list(self.fidelity.values()))) if self.fidelity else float("nan")

    def passing(self, bar: float) -> float:
        """Share of the faults whose fidelity reaches a bar."""
        return float(np.mean([f >= bar for f in self.fidelity.values()])) if self.fidelity else float("nan")


def kept(bank: Bank, pair: str) -> list[Kept]:
    """Measure every stand-in whose arms are stored; faults that do not change the original are left out."""
    original = Subject(pair)
    onset = bank.pair(original).onset
    reference, clean = {}, None
    for fault in map(find, stages.SAMPLE):
        arms = bank.read(original, fault, stages.TUNING)
        if arms is not None and fault.mode == "replay":
            signature = Signature(arms, "replay", onset)
            clean = clean or arms
            if signature.responds():
                reference[fault.name] = signature
    if clean is None:
        return []
    found = []
    for subject in (default_proxy(pair), *stages.variants(bank, pair)):
        fidelity, own = {}, None
        for name, signature in reference.items():
            arms = bank.read(subject, find(name), stages.TUNING)
            if arms is not None:
                own = own or arms
                fidelity[name] = similarity(signature, Signature(arms, "replay", onset))
        if own is None:
            continue
        ability = bank.ability(subject).get("proxy", float("nan"))
        found.append(Kept(subject.name.partition("/")[2], fidelity, _healthy(clean, own, onset), ability))
    return found


def _healthy(original: ArmSet, proxy: ArmSet, onset: int) -> dict[str, float]:
    gaps = {}
    for metric in LEVELS:
        if METRICS[metric].positive:
            a, b = (float(np.mean(stack(s.clean, s.seeds, metric, onset))) for s in (original, proxy))
            gaps[metric] = abs(np.log(b / a)) if a > 0 and b > 0 else float("nan")
    return gaps


def by_family(found: list[Kept]) -> dict[str, dict[str, float]]:
    """Mean fidelity by stand-in and family of faults."""
    table: dict[str, dict[str, float]] = {}
    for one in found:
        families: dict[str, list[float]] = {}
        for name, value in one.fidelity.items():
            families.setdefault(find(name).family, []).append(value)
        table[one.name] = {family: float(np.mean(v)) for family, v in sorted(families.items())}
    return table


def predictors(found: list[Kept]) -> dict[str, float]:
    """Spearman correlation of each healthy gap, and of the ability, with the mean fidelity over stand-ins."""
    from scipy.stats import spearmanr

    mean = [one.mean for one in found]
    columns = {m: [one.healthy[m] for one in found] for m in (found[0].healthy if found else ())}
    columns["ability"] = [one.ability for one in found]
    result = {}
    for name, values in columns.items():
        known = [(a, b) for a, b in zip(values, mean, strict=True) if np.isfinite(a)]
        if len(known) >= 4:
            result[name] = float(spearmanr(*zip(*known, strict=True)).statistic)
    return result
