"""One model's response to one fault, measured once, so that it can be held against many others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from harness.fidelity.align import ArmSet, stack
from harness.fidelity.evidence import Evidence, gather
from harness.fidelity.metrics import DEFAULT, METRICS, Mode, Thresholds
from harness.fidelity.noise import usable
from harness.fidelity.score import Table, table
from harness.fidelity.symptoms import Symptoms, describe

Measured = tuple[Evidence, Symptoms]


@dataclass(frozen=True)
class Signature:
    """Evidence and symptoms of one model under one fault, by metric.

    Attributes:
        arms: The traces; all arms must have the same steps.
        mode: ``replay`` or ``free``.
        onset: Step at which the fault wakes.
        thresholds: Margins and limits of detection.
    """

    arms: ArmSet
    mode: Mode
    onset: int
    thresholds: Thresholds = DEFAULT
    _held: dict[tuple[str, bool], Measured] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """Metrics of the table that were recorded, can respond in this mode and are finite in health."""
        recorded = set.intersection(*({*trace.metrics} for _, _, trace in self.arms.arms()))
        return tuple(
            m
            for m, spec in METRICS.items()
            if m in recorded
            and spec.observable(self.mode)
            and usable(stack(self.arms.clean, self.arms.seeds, m, self.onset))
        )

    def on_a_log_scale(self, metric: str) -> bool:
        """Whether the metric lives on a positive scale and never left it."""
        parts = (self.arms.clean, self.arms.faulted, self.arms.null)
        return METRICS[metric].positive and not any(
            (stack(part, self.arms.seeds, metric, self.onset) < 0).any() for part in parts
        )

    def measure(self, metric: str, log: bool) -> Measured:
        """Evidence and symptoms (one resample: all seeds) of a metric, as a log ratio or as a difference."""
        if (metric, log) not in self._held:
            seeds = self.arms.seeds
            clean, faulted, null = (
                stack(part, seeds, metric, self.onset) for part in (self.arms.clean, self.arms.faulted, self.arms.null)
            )
            e = gather(METRICS[metric], clean, faulted, null, log, self.mode, self.arms.resolution, self.thresholds)
            self._held[metric, log] = e, describe(e, np.arange(len(seeds))[None], self.thresholds)
        return self._held[metric, log]

    def responds(self) -> bool:
        """Whether any metric shows a symptom."""
        return any(self.measure(m, self.on_a_log_scale(m))[1].kind[0] != 0 for m in self.metrics)


def agreement(original: Signature, proxy: Signature, metrics: Sequence[str] | None = None) -> Table:
    """Agreement and weight of every metric that both recorded.

    Args:
        original: Of the one model.
        proxy: Of the other; the same steps after onset.
        metrics: These, if they are known; otherwise those that can be compared.
    """
    t = original.thresholds
    both = [m for m in original.metrics if m in proxy.metrics] if metrics is None else list(metrics)
    found: tuple[dict[str, Symptoms], dict[str, Symptoms]] = ({}, {})
    margins: dict[str, float] = {}
    for metric in both:
        log = original.on_a_log_scale(metric) and proxy.on_a_log_scale(metric)
        for signature, symptoms in zip((original, proxy), found, strict=True):
            evidence, symptoms[metric] = signature.measure(metric, log)
            margins[metric] = evidence.margin
    return table(*found, margins, t)


def similarity(original: Signature, proxy: Signature) -> float:
    """Fidelity of two responses without an interval: 0 where neither responds."""
    return float(agreement(original, proxy).overall(original.thresholds)[0])


def nearest(observed: Signature, known: Mapping[str, Signature]) -> list[tuple[str, float]]:
    """Rank known responses by their similarity to an observed one, the most similar first."""
    scores = [(name, similarity(observed, signature)) for name, signature in known.items()]
    return sorted(scores, key=lambda pair: (-pair[1], pair[0]))
