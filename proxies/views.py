"""Distances between the experts of a layer, seen from three sides, and their fusion."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from proxies.checkpoint import CheckpointError
from proxies.profile import LayerProfile

if TYPE_CHECKING:
    import torch

VIEWS = ("router", "coactivation", "context")


def cosine_distance(rows: torch.Tensor) -> torch.Tensor:
    """1 - cosine between rows [E, D] as [E, E] in [0, 2]; a zero row is at distance 1 from every other."""
    norms = rows.norm(dim=1, keepdim=True)
    unit = rows / norms.clamp(min=1e-300)
    distance = (1 - unit @ unit.T).clamp(0, 2)
    distance.fill_diagonal_(0)
    return distance


def router_view(profile: LayerProfile) -> torch.Tensor:
    """Distance of router rows: experts that the router tells apart little."""
    return cosine_distance(profile.router)


def coactivation_view(profile: LayerProfile) -> torch.Tensor:
    """1 - Jaccard index of the sets of tokens routed to two experts: experts that do not work together."""
    together = profile.coactivation
    either = profile.frequency[:, None] + profile.frequency[None, :] - together
    distance = 1 - together / either.clamp(min=1)
    distance.fill_diagonal_(0)
    return distance


def context_view(profile: LayerProfile) -> torch.Tensor:
    """Distance of routed-context prototypes: experts that see different hidden states."""
    return cosine_distance(profile.context)


def normalised(distance: torch.Tensor) -> torch.Tensor:
    """Divide by the mean off-diagonal distance, so that views can be added; all-zero stays all-zero."""
    experts = len(distance)
    mean = distance.sum() / max(experts * (experts - 1), 1)
    return distance / mean if mean > 0 else distance


def fused(profile: LayerProfile, weights: Mapping[str, float] | None = None) -> torch.Tensor:
    """Weighted sum of the normalised views: [E, E], zero diagonal.

    Args:
        profile: one layer.
        weights: weight by view (`VIEWS`); equal weights if None.

    Raises:
        CheckpointError: a weight is negative or not finite, or all are zero.
    """
    weights = dict.fromkeys(VIEWS, 1.0) if weights is None else weights
    makers = {"router": router_view, "coactivation": coactivation_view, "context": context_view}
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise CheckpointError(f"the weight of the {name} view is {weight}; it must be zero or a positive number.")
    total = sum(weights.values())
    if not total:
        raise CheckpointError("the weights of all views are zero; at least one view must count.")
    views = [normalised(makers[name](profile)) * (weight / total) for name, weight in weights.items() if weight]
    result = views[0]
    for view in views[1:]:
        result = result + view
    return result
