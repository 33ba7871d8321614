"""Does a remedy give the clean response back? Says what still responds when fault and remedy act together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.fidelity.report import FidelityReport
from harness.fidelity.symptoms import Symptom

Outcome = Literal["RESTORED", "PARTLY", "NOT_RESTORED", "NOTHING_TO_RESTORE", "UNKNOWN"]
MODELS = ("original", "proxy")
EASED = 0.25  # a response of at most this share of what it was counts as eased
PHRASES: dict[Outcome, str] = {
    "RESTORED": "restores the clean response of the {model}",
    "PARTLY": "restores part of the clean response of the {model}",
    "NOT_RESTORED": "does not restore the clean response of the {model}",
    "NOTHING_TO_RESTORE": "has nothing to restore in the {model}",
    "UNKNOWN": "says nothing about the {model}",
}


@dataclass(frozen=True)
class Restoration:
    """What a remedy does to a fault's response, by model.

    Attributes:
        outcome: RESTORED if no metric responds any more; PARTLY if some that did are cured or eased; NOT_RESTORED if
            none is; NOTHING_TO_RESTORE if none responded; UNKNOWN if the arms could not be compared.
        cured: Metrics that respond to the fault and no longer do with the remedy.
        remaining: Metrics that respond with and without it.
        eased: Those of the remaining whose response is at most ``EASED`` of what it was, or finite where it was not.
        added: Metrics that respond only with the remedy.
        reason: All of that in a sentence.
    """

    outcome: Mapping[str, Outcome]
    reason: str
    cured: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    remaining: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    eased: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    added: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def agrees(self) -> bool | None:
        """Whether the proxy says about the remedy what the original says; None if one of them says nothing."""
        outcomes = [self.outcome[model] for model in MODELS]
        return None if "UNKNOWN" in outcomes else outcomes[0] == outcomes[1]

    def to_json(self) -> dict[str, Any]:
        """Return JSON data."""
        parts = {"cured": self.cured, "remaining": self.remaining, "eased": self.eased, "added": self.added}
        return {
            "outcome": dict(self.outcome),
            "agrees": self.agrees,
            "reason": self.reason,
            **{name: {model: list(metrics) for model, metrics in part.items()} for name, part in parts.items()},
        }


def restoration(remedy: str, faulted: FidelityReport, remedied: FidelityReport) -> Restoration:
    """Compare what responds to a fault with what responds to fault and remedy together.

    Args:
        remedy: Name of the remedy.
        faulted: Comparison of the faulted arms with their clean twins.
        remedied: The same with the remedied arms in place of the faulted ones.
    """
    if not faulted.symptoms or not remedied.symptoms:
        silent = remedied if faulted.symptoms else faulted
        reason = f"{remedy} cannot be judged: {silent.reason}"
        return Restoration(dict.fromkeys(MODELS, "UNKNOWN"), reason)
    before, after = ({model: _responding(report, model) for model in MODELS} for report in (faulted, remedied))
    cured = {m: tuple(x for x in before[m] if x not in after[m]) for m in MODELS}
    remaining = {m: tuple(x for x in before[m] if x in after[m]) for m in MODELS}
    added = {m: tuple(x for x in after[m] if x not in before[m]) for m in MODELS}
    eased = {
        m: tuple(x for x in remaining[m] if _shrunk(faulted.symptoms[m][x], remedied.symptoms[m][x])) for m in MODELS
    }
    outcome = {m: _outcome(before[m], cured[m] + eased[m], after[m]) for m in MODELS}
    told = [_told(outcome[m], m, cured[m], remaining[m], eased[m], added[m]) for m in MODELS]
    return Restoration(outcome, f"{remedy} {told[0]}, and {told[1]}.", cured, remaining, eased, added)


def _shrunk(before: Symptom, after: Symptom) -> bool:
    if not math.isfinite(after.size):
        return False
    return not math.isfinite(before.size) or abs(after.size) <= EASED * abs(before.size)


def _responding(report: FidelityReport, model: str) -> tuple[str, ...]:
    return tuple(m for m, symptom in report.symptoms[model].items() if symptom.kind != "none")


def _outcome(before: tuple[str, ...], better: tuple[str, ...], after: tuple[str, ...]) -> Outcome:
    if not before:
        return "NOTHING_TO_RESTORE"
    if not after:
        return "RESTORED"
    return "PARTLY" if better else "NOT_RESTORED"


def _told(outcome: Outcome, model: str, *lists: tuple[str, ...]) -> str:
    cured, remaining, eased, added = lists
    notes = []
    if remaining:
        less = f", {len(eased)} of them far less" if eased else ""
        total = len(cured) + len(remaining)
        notes.append(f"{len(remaining)} of {total} metrics still respond{less}: {_few(remaining)}")
    if added:
        notes.append(f"only with it do {_few(added)}")
    return PHRASES[outcome].format(model=model) + (f" ({'; '.join(notes)})" if notes else "")


def _few(metrics: tuple[str, ...]) -> str:
    rest = f" and {len(metrics) - 3} more" if len(metrics) > 3 else ""
    return ", ".join(metrics[:3]) + rest
