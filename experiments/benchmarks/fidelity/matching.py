"""Every response of the originals held against every response of the proxies: separation and identification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.fidelity.align import Floats
from harness.fidelity.metrics import DEFAULT, METRICS, Thresholds
from harness.fidelity.score import Parts, Table, parts_of, relevance
from harness.fidelity.signature import Signature
from harness.fidelity.symptoms import Symptoms


@dataclass(frozen=True)
class Pairwise:
    """All N x N comparisons of N faults in two models, metric by metric.

    Attributes:
        names: The faults.
        metrics: The metrics.
        parts: Parts of the agreement by metric, flattened over pairs (original's fault first): ``[N * N]`` each.
        symptoms: Of the originals and of the proxies by metric, as ``relevance`` needs them, flattened likewise.
        margins: Margin of each metric.
        known: Whether both models of a pair have the metric: ``[M, N * N]``.
    """

    names: tuple[str, ...]
    metrics: tuple[str, ...]
    parts: tuple[Parts, ...]
    symptoms: tuple[tuple[Symptoms, Symptoms], ...]
    margins: tuple[float, ...]
    known: npt.NDArray[np.bool_]

    def scores(self, t: Thresholds = DEFAULT) -> Floats:
        """Overall fidelity of every pair under some weights: ``[N, N]``."""
        weight = np.stack([relevance(o, p, m, t) for (o, p), m in zip(self.symptoms, self.margins, strict=True)])
        agree = np.stack([p.agreement(t) for p in self.parts])
        size = len(self.names)
        return Table(self.metrics, agree, weight * self.known).overall(t).reshape(size, size)


def pairwise(originals: Mapping[str, Signature], proxies: Mapping[str, Signature]) -> Pairwise:
    """Compare every original's response with every proxy's.

    A metric is a log ratio where neither left the positive numbers in any fault (see ``Signature.on_a_log_scale``),
    so that one scale serves all pairs; what ``harness run`` decides pair by pair differs only where a metric that
    lives on positive numbers became negative.
    """
    names = tuple(originals)
    size = len(names)
    first, second = np.repeat(np.arange(size), size), np.tile(np.arange(size), size)
    metrics = tuple(m for m in METRICS if any(m in s.metrics for s in originals.values()))
    rows, both, margins, known = [], [], [], []
    for metric in metrics:
        signatures = [[s[n] for n in names] for s in (originals, proxies)]
        has = [np.array([metric in s.metrics for s in found]) for found in signatures]
        log = all(s.on_a_log_scale(metric) for found in signatures for s in found if metric in s.metrics)
        joined = []
        for found, there in zip(signatures, has, strict=True):
            measured = [s.measure(metric, log)[1] if h else None for s, h in zip(found, there, strict=True)]
            joined.append(_joined(measured))
        o, p = _taken(joined[0], first), _taken(joined[1], second)
        rows.append(parts_of(o, p))
        both.append((o, p))
        margins.append(DEFAULT.margin(log))
        known.append(has[0][first] & has[1][second])
    return Pairwise(names, metrics, tuple(rows), tuple(both), tuple(margins), np.stack(known))


def _joined(found: Sequence[Symptoms | None]) -> Symptoms:
    some = next(s for s in found if s is not None)
    return Symptoms(
        **{
            f: np.concatenate([getattr(some if s is None else s, f) for s in found])
            for f in Symptoms.__dataclass_fields__
        }
    )


def _taken(s: Symptoms, at: npt.NDArray[np.int64]) -> Symptoms:
    return Symptoms(**{f: getattr(s, f)[at] for f in Symptoms.__dataclass_fields__})


def _below(value: Floats, others: Floats) -> Floats:
    """Share of sorted others that are smaller, ties half."""
    left, right = (np.searchsorted(others, value, side) for side in ("left", "right"))
    return np.asarray((left + right) / 2 / len(others))


def area(scores: Floats, mismatched: npt.NDArray[np.bool_] | None = None) -> float:
    """Area under the ROC curve: a matched pair (diagonal) scores more than a mismatched one of any kind.

    Args:
        scores: ``[N, N]``, the original's fault first.
        mismatched: Which pairs count as mismatched; all but the diagonal by default.
    """
    off = ~np.eye(len(scores), dtype=bool) if mismatched is None else mismatched
    return float(np.mean(_below(np.diag(scores), np.sort(scores[off]))))


def own_area(scores: Floats, mismatched: npt.NDArray[np.bool_] | None = None) -> Floats:
    """The same for each fault alone, against the mismatched pairs that it is part of: ``[N]``."""
    off = ~np.eye(len(scores), dtype=bool) if mismatched is None else mismatched
    found = []
    for i, own in enumerate(np.diag(scores)):
        others = np.concatenate([scores[i][off[i]], scores[:, i][off[:, i]]])
        found.append(float(_below(own, np.sort(others))))
    return np.array(found)


def ranks(scores: Floats, groups: Sequence[int] | None = None) -> npt.NDArray[np.int64]:
    """Rank (0 is best) of the right proxy response for every original's response; a tie counts as a loss.

    Args:
        scores: ``[N, N]``, the original's fault first.
        groups: Group of each fault: naming any member of the right group is right, and a group counts once.
    """
    size = len(scores)
    label = np.arange(size) if groups is None else np.asarray(groups)
    best = np.stack([scores[:, label == g].max(axis=1) for g in np.unique(label)], axis=1)
    own = best[np.arange(size), np.searchsorted(np.unique(label), label)]
    return np.asarray((best >= own[:, None]).sum(axis=1) - 1)
