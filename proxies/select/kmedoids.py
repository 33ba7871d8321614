"""K-medoids over fused views, started from the most frequent experts (after arXiv 2608.10823)."""

from __future__ import annotations

from proxies.profile import LayerProfile
from proxies.views import fused


def select(
    layer: LayerProfile,
    keep: int,
    *,
    seed: int,
    layer_index: int,
    router: float = 1.0,
    coactivation: float = 1.0,
    context: float = 1.0,
    iterations: int = 100,
) -> list[int]:
    """Keep the medoids of `keep` clusters; the three weights fuse the views.

    Alternates assignment to the nearest medoid and the choice of each cluster's medoid until nothing changes. Where
    candidates for a medoid are equally central, the more frequent one wins.
    """
    distance = fused(layer, {"router": router, "coactivation": coactivation, "context": context})
    medoids = sorted(int(e) for e in layer.frequency.argsort(descending=True, stable=True)[:keep])
    for _ in range(iterations):
        nearest = distance[:, medoids].argmin(dim=1)
        new = []
        for cluster, medoid in enumerate(medoids):
            members = [int(e) for e in (nearest == cluster).nonzero().flatten()]
            members = members or [medoid]
            cost = distance[members][:, members].sum(dim=0)
            new.append(min(members, key=lambda e: (float(cost[members.index(e)]), -float(layer.frequency[e]), e)))
        if sorted(new) == medoids:
            break
        medoids = sorted(new)
    return medoids
