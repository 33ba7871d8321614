"""From two measured models to a verdict and its sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from harness.claims import Claim
from harness.fidelity.evidence import Evidence
from harness.fidelity.metrics import METRICS, Mode, Thresholds
from harness.fidelity.noise import inside_margin, interval, windows
from harness.fidelity.outlook import advice, seeds_for_interval, seeds_for_margin
from harness.fidelity.report import Verdict
from harness.fidelity.score import Table
from harness.fidelity.symptoms import Symptom, holds

MODELS = ("original", "proxy")


@dataclass(frozen=True)
class Comparison:
    """Both models measured: evidence and symptoms by model and metric, and their agreement (B = 1)."""

    mode: Mode
    onset: int
    thresholds: Thresholds
    evidence: dict[str, dict[str, Evidence]]
    symptoms: dict[str, dict[str, Symptom]]
    table: Table

    @property
    def margins(self) -> dict[str, float]:
        """Margin of each metric, as a response."""
        return {m: e.margin for m, e in self.evidence["original"].items()}

    @property
    def seeds(self) -> int:
        """Seeds of the model that has fewer."""
        return min(len(next(iter(found.values())).response) for found in self.evidence.values())


class Decision(NamedTuple):
    """A verdict, its sentence, and the number of seeds in all that would settle it if it is INCONCLUSIVE."""

    verdict: Verdict
    reason: str
    seeds_needed: int | None = None


def undecided_metrics(c: Comparison) -> list[str]:
    """Metrics in which one model shifts or drifts, and the other does not, but might.

    It might if its 90% interval reaches half of the size, or if its null spread would hide a shift of that size.
    """
    names = []
    for metric in c.table.metrics:
        pair = [c.symptoms[model][metric] for model in MODELS]
        silent = [s.kind == "none" for s in pair]
        if silent[0] == silent[1]:
            continue
        loud, quiet = pair[silent.index(False)], c.evidence[MODELS[silent.index(True)]][metric]
        if loud.kind in ("level_shift", "drift"):
            low, high = interval(quiet.response)
            reach = float(np.max(high)) if loud.sign > 0 else -float(np.min(low))
            blind = c.thresholds.level_units * float(quiet.noise.level[0] * np.median(quiet.noise.spread))
            size = abs(quiet.scale.unsize(loud.size))
            if not (reach < size / 2 and blind < size):
                names.append(metric)
    return names


def claim_row(claim: Claim, c: Comparison) -> dict[str, Any]:
    """Say of an expected claim whether it holds, by model; None if the metric is not observable."""
    row: dict[str, Any] = {"claim": str(claim)}
    for model in MODELS:
        symptom = c.symptoms[model].get(claim.metric)
        row[model] = None if symptom is None else holds(claim, symptom, c.thresholds)
    return row


def without_response(c: Comparison) -> Decision:
    """NO_EFFECT if every metric of the original was shown to lie inside its margin; else INCONCLUSIVE."""
    evidence = c.evidence["original"]
    inside = {m: inside_margin(e.response, e.margin) for m, e in evidence.items()}
    bounds = {m: interval(e.response) for m, e in evidence.items()}
    reach = {m: float(np.nan_to_num(np.max(np.maximum(-low, high)), nan=np.inf)) for m, (low, high) in bounds.items()}
    worst = max(evidence, key=lambda m: (not inside[m], reach[m] / evidence[m].margin))
    e = evidence[worst]
    low, high = float(bounds[worst][0].min()), float(bounds[worst][1].max())
    spread = e.scale.size(float(np.median(e.noise.spread)))
    where = (
        f"{worst} of the original, the least certain metric, changes by {e.scale.size(low):+.3g} to "
        f"{e.scale.size(high):+.3g} ({_unit(e)}, 90% interval, null spread {spread:.2g}) from step {c.onset} on"
    )
    if all(inside.values()):
        reason = f"every metric of the original stays inside its margin: {where}; margin {e.margin:g}."
        return Decision("NO_EFFECT", reason)
    needed = max((_seeds_to_show(c, m, reach[m]) for m in evidence if not inside[m]), key=_most)
    return Decision(
        "INCONCLUSIVE",
        "the original shows no response, but that there is none is not shown: "
        f"{where}, beyond the margin {e.margin:g}; {advice(needed, c.seeds)}.",
        needed,
    )


def _seeds_to_show(c: Comparison, metric: str, reach: float) -> int | None:
    e = c.evidence["original"][metric]
    centre = float(np.max(np.abs([e.response[:, w].mean() for w in windows(e.response.shape[1])])))
    return seeds_for_margin(reach, centre, e.margin, c.seeds)


def _most(needed: int | None) -> float:
    return np.inf if needed is None else needed


def _unit(e: Evidence) -> str:
    return "log ratio" if e.scale.log else "clean step-to-step spreads"


def decide(c: Comparison, overall: float, ci: tuple[float, float], undecided: list[str]) -> Decision:
    """Hold the interval of the overall fidelity against the bar."""
    t = c.thresholds
    low, high = ci
    verdict: Verdict
    if low >= t.bar:
        verdict, rule = "REPRODUCED", f"the lower end reaches the bar {t.bar:.2f}"
    elif high >= t.bar:
        verdict, rule = "INCONCLUSIVE", f"the interval straddles the bar {t.bar:.2f}"
    elif overall >= t.partial:
        verdict, rule = "PARTIAL", f"between {t.partial:.2f} and the bar {t.bar:.2f}"
    else:
        verdict, rule = "NOT_REPRODUCED", f"below {t.partial:.2f}"
    share = np.array([t.primary_weight if METRICS[m].primary else 1 - t.primary_weight for m in c.table.metrics])
    agreement = c.table.agreement[:, 0]
    credit = c.table.weight[:, 0] * share * (agreement if verdict == "REPRODUCED" else 1 - agreement)
    metric = c.table.metrics[int(np.argmax(credit))]
    told = "; ".join(f"{model} {_tell(c, model, metric)}" for model in MODELS)
    noisy = f"; too noisy to tell in {', '.join(undecided)}" if undecided and verdict == "INCONCLUSIVE" else ""
    straddles = verdict == "INCONCLUSIVE"
    needed = seeds_for_interval(overall, ci, t.bar, c.seeds) if straddles else None
    more = f"; {advice(needed, c.seeds)}" if straddles else ""
    reason = (
        f"fidelity {overall:.2f} [{low:.2f}, {high:.2f}], {rule}{noisy}; "
        f"{metric} decides with {agreement[int(np.argmax(credit))]:.2f}: {told}{more}."
    )
    return Decision(verdict, reason, needed)


def _tell(c: Comparison, model: str, metric: str) -> str:
    s, e = c.symptoms[model][metric], c.evidence[model][metric]
    if s.kind == "none":
        return f"does not respond ({s.size:+.3g} {_unit(e)}, null spread {s.null_spread:.2g})"
    if s.kind == "nonfinite":
        return f"becomes {s.which} at step {s.onset}, where its clean and null twins are finite"
    kind = f"{s.which} value" if s.kind == "frozen" else s.kind.replace("_", " ")
    return f"shows a {kind} from step {s.onset} ({s.size:+.3g} {_unit(e)}, null spread {s.null_spread:.2g})"
