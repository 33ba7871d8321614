"""Weights of the score from data: which setting tells matched from mismatched pairs best, whole faults left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from experiments.benchmarks.fidelity.matching import Pairwise, area, own_area
from harness.fidelity.metrics import DEFAULT, Thresholds

FOLDS = 10
PARTS = ((0.0, 0.4), (0.0, 0.6), (0.1, 0.2), (0.1, 0.4), (0.1, 0.6), (0.25, 0.2), (0.25, 0.4), (0.25, 0.6), (0.4, 0.4))
"""Weights of onset and size; the shape has the rest."""


@dataclass(frozen=True)
class Calibration:
    """What a search over weights gains.

    Attributes:
        tried: Number of settings.
        best: The one with the largest area on all faults.
        area: Mean own area of faults that had no part in choosing their weights.
        provisional: The same of the weights that are in use.
        gain: Mean difference.
        error: Standard error of that mean over the faults.
    """

    tried: int
    best: Thresholds
    area: float
    provisional: float
    gain: float
    error: float


def settings() -> Iterator[Thresholds]:
    """Yield the settings that are tried."""
    for (onset, size), scatter, primary, relevance in product(
        PARTS, (0.03, 0.1, 0.3), (0.3, 0.5, 0.65, 0.8), (2, 5, 20)
    ):
        yield replace(
            DEFAULT,
            onset_weight=onset,
            size_weight=size,
            shape_weight=1 - onset - size,
            undirected_weight=scatter,
            primary_weight=primary,
            relevance=float(relevance),
        )


def calibrate(pairs: Pairwise) -> Calibration:
    """Search the settings in ten folds of whole faults.

    Args:
        pairs: Originals against proxies.
    """
    tried = list(settings())
    scores = [pairs.scores(t) for t in tried]
    usual = own_area(pairs.scores())
    order = np.random.default_rng(0).permutation(len(pairs.names))
    found = np.zeros(len(order))
    for fold in np.array_split(order, min(FOLDS, len(order))):
        rest = np.setdiff1d(order, fold)
        best = max(range(len(tried)), key=lambda i: area(scores[i][np.ix_(rest, rest)]))
        found[fold] = own_area(scores[best])[fold]
    gain = found - usual
    best = max(range(len(tried)), key=lambda i: area(scores[i]))
    error = float(gain.std(ddof=1) / np.sqrt(len(gain)))
    return Calibration(len(tried), tried[best], float(found.mean()), float(usual.mean()), float(gain.mean()), error)
