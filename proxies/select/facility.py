"""Facility location: what is lost if every expert must be served by its nearest kept neighbour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxies.profile import LayerProfile
from proxies.views import fused

if TYPE_CHECKING:
    import torch


def cost(distance: torch.Tensor, demand: torch.Tensor, kept: list[int]) -> float:
    """Sum over experts of demand times distance to the nearest kept expert."""
    return float((demand * distance[:, kept].amin(dim=1)).sum())


def select(
    layer: LayerProfile,
    keep: int,
    *,
    seed: int,
    layer_index: int,
    router: float = 1.0,
    coactivation: float = 1.0,
    context: float = 1.0,
) -> list[int]:
    """Minimise the saliency-weighted distance of every expert to the nearest kept one, over fused views.

    Greedy choice, then exchanges of one kept for one dropped expert as long as one lowers the cost. Greedy alone is
    within 1 - 1/e of the best possible reduction (Nemhauser, Wolsey and Fisher, 1978); the objective is that of
    weighted k-medians.
    """
    import torch

    distance = fused(layer, {"router": router, "coactivation": coactivation, "context": context})
    demand = layer.saliency
    kept: list[int] = []
    served = torch.full((layer.experts,), float(distance.max()) + 1.0, dtype=distance.dtype)
    for _ in range(keep):
        total = (demand[:, None] * torch.minimum(served[:, None], distance)).sum(dim=0)
        total[kept] = torch.inf
        best = int(total.argmin())
        kept.append(best)
        served = torch.minimum(served, distance[:, best])
    return _exchange(distance, demand, kept)


def _exchange(distance: torch.Tensor, demand: torch.Tensor, kept: list[int]) -> list[int]:
    """Swap single experts while it lowers the cost."""
    import torch

    current = cost(distance, demand, kept)
    improved = True
    while improved:
        improved = False
        for position in range(len(kept)):
            others = kept[:position] + kept[position + 1 :]
            served = distance[:, others].amin(dim=1) if others else torch.full_like(demand, torch.inf)
            total = (demand[:, None] * torch.minimum(served[:, None], distance)).nan_to_num(0.0).sum(dim=0)
            total[kept] = torch.inf
            best = int(total.argmin())
            if float(total[best]) < current * (1 - 1e-12):
                kept[position], current, improved = best, float(total[best]), True
    return kept
