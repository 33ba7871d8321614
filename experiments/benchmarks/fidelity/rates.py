"""False alarms and power: how often healthy runs are called an effect, and how often a fault is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from experiments.benchmarks.fidelity import stages
from experiments.benchmarks.fidelity.bank import Bank, Subject, default_proxy
from harness.catalogue import find
from harness.fidelity import compare
from harness.fidelity.align import ArmSet
from harness.fidelity.signature import Signature

GROUP = 3
"""Seeds of one draw: what ``harness run`` takes by default."""


@dataclass(frozen=True)
class Rate:
    """A share of draws with its two-sided 95% interval (Clopper and Pearson 1934) and its one-sided upper bound."""

    count: int
    draws: int

    def __str__(self) -> str:
        """Return count, draws, share and bounds."""
        from scipy.stats import beta, binomtest

        if not self.draws:
            return "no draws"
        ci = binomtest(self.count, self.draws).proportion_ci(0.95, "exact")
        upper = 1.0 if self.count == self.draws else float(beta.ppf(0.95, self.count + 1, self.draws - self.count))
        share = self.count / self.draws
        return f"{self.count} of {self.draws} ({share:.1%} [{ci.low:.1%}, {ci.high:.1%}], upper 95% bound {upper:.1%})"


@dataclass(frozen=True)
class Alarms:
    """What two null draws of healthy runs were called.

    Attributes:
        effect: Draws in which a metric of one model showed a symptom.
        by_metric: The same by metric, where it happened.
        verdicts: Verdicts of original and proxy held against each other, by name.
    """

    effect: Rate
    by_metric: dict[str, int]
    verdicts: dict[str, int]


def _groups(bank: Bank, pair: str) -> Iterator[tuple[ArmSet, ArmSet]]:
    seeds = list(stages.NULL_SEEDS)
    for at in range(0, len(seeds) - GROUP + 1, GROUP):
        chosen = tuple(seeds[at : at + GROUP])
        sets = [bank.null_set(s, find("noop"), chosen, (0, 1)) for s in (Subject(pair), default_proxy(pair))]
        if sets[0] is not None and sets[1] is not None:
            yield sets[0], sets[1]


def false_alarms(bank: Bank, pair: str) -> Alarms:
    """Call the second null draw a fault, in groups of three seeds that share no seed."""
    mode, onset = find("noop").mode, bank.pair(Subject(pair)).onset
    alarms, draws = 0, 0
    metrics: dict[str, int] = {}
    verdicts: dict[str, int] = {}
    for sets in _groups(bank, pair):
        for arms in sets:
            signature = Signature(arms, mode, onset)
            shown = [m for m in signature.metrics if signature.measure(m, signature.on_a_log_scale(m))[1].kind[0]]
            draws, alarms = draws + 1, alarms + bool(shown)
            for metric in shown:
                metrics[metric] = metrics.get(metric, 0) + 1
        verdict = compare(*sets, mode=mode, onset=onset).verdict
        verdicts[verdict] = verdicts.get(verdict, 0) + 1
    return Alarms(Rate(alarms, draws), metrics, verdicts)


def power(signatures: dict[str, Signature], again: dict[str, Signature]) -> tuple[Rate, list[str]]:
    """Share of the faults that respond on one set of seeds which also do so on another, and those that do not.

    Args:
        signatures: Of the original, on the seeds that say which faults change it.
        again: On other seeds.
    """
    expected = [n for n, s in signatures.items() if n in again and s.responds()]
    lost = [n for n in expected if not again[n].responds()]
    return Rate(len(expected) - len(lost), len(expected)), lost
