"""The result of a comparison, as a value and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.fidelity.metrics import METRICS, Mode
from harness.fidelity.symptoms import Symptom
from harness.trace import to_json_value

Verdict = Literal["REPRODUCED", "PARTIAL", "NOT_REPRODUCED", "NO_EFFECT", "VOID", "INCONCLUSIVE", "CRASHED"]


@dataclass(frozen=True)
class FidelityReport:
    """What the comparison of an original and its proxy under one fault came to.

    Attributes:
        verdict: The verdict; CRASHED is given elsewhere, when an arm did not finish.
        reason: Why, in one sentence.
        mode: ``replay`` or ``free``.
        onset: Step at which the fault wakes.
        fired: Steps in which the fault ran, summed over seeds, by model.
        overall: Fidelity over all metrics, 0 to 1; None if it was not scored.
        ci: Interval of the overall fidelity.
        fidelity: Fidelity by metric; None if it is not observable or neither model responds.
        symptoms: Symptom by model ("original", "proxy") and metric.
        onset_lags: Onset in the proxy minus onset in the original, in steps, where both respond.
        size_ratios: Absolute size in the proxy over that in the original, where both respond.
        weights: Relevance by metric, 0 to 1.
        severity_to_trip: Severity at which each model trips, for a threshold fault.
        trip_fidelity: Agreement of these.
        claims: For each expected claim its words and, by model, whether it holds; None if not observable.
        details: Further numbers behind the verdict.
    """

    verdict: Verdict
    reason: str
    mode: Mode
    onset: int
    fired: Mapping[str, int]
    overall: float | None = None
    ci: tuple[float, float] | None = None
    fidelity: Mapping[str, float | None] = field(default_factory=dict)
    symptoms: Mapping[str, Mapping[str, Symptom]] = field(default_factory=dict)
    onset_lags: Mapping[str, int] = field(default_factory=dict)
    size_ratios: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    severity_to_trip: tuple[float | None, float | None] | None = None
    trip_fidelity: float | None = None
    claims: tuple[Mapping[str, Any], ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data; non-finite numbers are the strings "nan", "inf", "-inf"."""
        by_metric = {m: to_json_value(self.fidelity.get(m)) for m in {**METRICS, **self.fidelity}}
        trip = self.severity_to_trip
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "mode": self.mode,
            "onset": self.onset,
            "fired": dict(self.fired),
            "fidelity": {
                "overall": to_json_value(self.overall),
                "ci": None if self.ci is None else list(self.ci),
                **by_metric,
            },
            "symptoms": {model: {m: s.to_dict() for m, s in found.items()} for model, found in self.symptoms.items()},
            "onset_lags": dict(self.onset_lags),
            "size_ratios": {m: to_json_value(v) for m, v in self.size_ratios.items()},
            "weights": dict(self.weights),
            "severity_to_trip": None
            if trip is None
            else {"original": to_json_value(trip[0]), "proxy": to_json_value(trip[1])},
            "trip_fidelity": self.trip_fidelity,
            "claims": [dict(c) for c in self.claims],
            "details": dict(self.details),
        }
