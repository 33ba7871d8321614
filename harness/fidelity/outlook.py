"""What stands between a comparison and a decision: steps that nobody recorded, and seeds that were not run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from harness.claims import Claim, NonFinite, Spikes
from harness.fidelity.symptoms import Symptom

MOST_SEEDS = 64
"""More seeds than that are not promised: the fidelity lies too near the bar for its scatter."""


def hidden(
    verdict: str,
    symptoms: Mapping[str, Mapping[str, Symptom]],
    expects: Sequence[Claim],
    hole: tuple[int, int],
) -> str | None:
    """Say what an isolated event between two recorded steps could have changed; None if nothing that matters.

    It matters if no response was found at all, if only one model shows a spike, or if the fault is known to cause an
    isolated event that neither shows.

    Args:
        verdict: The verdict without regard to the steps that were not recorded.
        symptoms: By model and metric.
        expects: Claims of the fault.
        hole: Two neighbouring recorded steps with unrecorded ones between them.
    """
    between = f"between steps {hole[0]} and {hole[1]}, which are neighbours in the record,"
    if verdict == "NO_EFFECT":
        return f"{between} a spike could not have been seen"
    original, proxy = symptoms["original"], symptoms["proxy"]
    for metric, symptom in original.items():
        if (symptom.kind == "spike") != (proxy[metric].kind == "spike"):
            who = "original" if symptom.kind == "spike" else "proxy"
            return f"only the {who} shows a spike of {metric}; {between} the other's could not have been seen"
    for claim in expects:
        if isinstance(claim, (Spikes, NonFinite)) and claim.metric in original:
            kind = "spike" if isinstance(claim, Spikes) else "nonfinite"
            if kind not in (original[claim.metric].kind, proxy[claim.metric].kind):
                return f"neither model shows that {claim}, which the fault is known for; {between} it may have happened"
    return None


def seeds_for_interval(point: float, ci: tuple[float, float], bar: float, seeds: int) -> int | None:
    """Number of seeds at which an interval that straddles the bar would no longer do so.

    Half-widths shrink with the root of the number of seeds: ``n (half / distance to the bar)^2``.

    Returns:
        All seeds, those that were run included; None if more than ``MOST_SEEDS`` or beyond telling.
    """
    half = point - ci[0] if point >= bar else ci[1] - point
    return _seeds(half, abs(point - bar), seeds)


def seeds_for_margin(reach: float, mean: float, margin: float, seeds: int) -> int | None:
    """Number of seeds at which an interval that reaches beyond the margin would lie inside it.

    Args:
        reach: Largest absolute end of the interval.
        mean: Absolute centre of the interval.
        margin: The margin.
        seeds: Seeds that were run.

    Returns:
        As ``seeds_for_interval``; None also if the centre itself lies outside.
    """
    return _seeds(reach - mean, margin - mean, seeds)


def _seeds(half: float, room: float, seeds: int) -> int | None:
    if not (half > 0 and room > 0 and math.isfinite(half)):
        return None
    needed = seeds * (half / room) ** 2
    return max(seeds + 1, math.ceil(needed - 1e-9)) if needed <= MOST_SEEDS else None


def advice(needed: int | None, seeds: int) -> str:
    """Say how many more seeds would settle an INCONCLUSIVE verdict."""
    if needed is None:
        return f"more seeds are not expected to settle it (up to {MOST_SEEDS})"
    more = needed - seeds
    return f"about {more} more seed{'s' if more > 1 else ''} would settle it if the scatter stays as it is"


def attenuation(healthy: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Predict from the healthy models how much smaller a response of the expert layers is in the proxy.

    Args:
        healthy: Mean clean value by model and metric.

    Returns:
        ``topk_mass``: the mass of the chosen experts in each model and, as ``size_ratio``, the ratio of the log sizes
        of a fault that scales the expert layers by that mass, ``log m_proxy / log m_original``.
        ``expert_share``: the experts' share of the squared gradient norm in each model and, as ``size_ratio``, the
        ratio of the shares: of a small change of the expert gradients, relative to the whole norm.
    """
    found: dict[str, dict[str, float]] = {}
    masses = {model: values.get("topk_mass", math.nan) for model, values in healthy.items()}
    if all(0 < m < 1 for m in masses.values()):
        found["topk_mass"] = {**masses, "size_ratio": math.log(masses["proxy"]) / math.log(masses["original"])}
    shares = {
        model: (values.get("grad_norm/experts", math.nan) / values.get("grad_norm", math.nan)) ** 2
        for model, values in healthy.items()
        if values.get("grad_norm")
    }
    if len(shares) == len(healthy) and all(0 < s < math.inf for s in shares.values()):
        found["expert_share"] = {**shares, "size_ratio": shares["proxy"] / shares["original"]}
    return found
