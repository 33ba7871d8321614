"""Hierarchical clustering of mean expert outputs, after HC-SMoE (arXiv 2410.08589), choosing instead of merging."""

from __future__ import annotations

from proxies.checkpoint import CheckpointError
from proxies.profile import LayerProfile
from proxies.select import needed

NEEDS_OUTPUTS = True


def select(
    layer: LayerProfile,
    keep: int,
    *,
    seed: int,
    layer_index: int,
    linkage: str = "average",
    metric: str = "euclidean",
    representative: str = "frequency",
) -> list[int]:
    """Cluster the experts by their output averaged over all calibration tokens, and keep one of each cluster.

    Args:
        layer: profile with outputs.
        keep: number of clusters.
        seed: not used.
        layer_index: not used.
        linkage: of the clusters: average, complete, single or ward.
        metric: between mean outputs, as in `scipy.spatial.distance.pdist`.
        representative: `frequency` keeps the most frequent member, `central` the one closest to the cluster's mean.

    Raises:
        CheckpointError: an option has no such value, or the profile holds no outputs.
    """
    from scipy.cluster.hierarchy import cut_tree
    from scipy.cluster.hierarchy import linkage as link

    if representative not in ("frequency", "central"):
        raise CheckpointError(f"option representative is {representative!r}; it must be frequency or central.")
    outputs = needed(layer.mean_output, "output_clusters")
    if keep == layer.experts:
        return list(range(keep))
    try:
        tree = link(outputs.numpy(), method=linkage, metric=metric)
    except ValueError as e:
        raise CheckpointError(f"linkage {linkage!r} with metric {metric!r} cannot be used: {e}.") from e
    labels = cut_tree(tree, n_clusters=keep)[:, 0]
    kept = []
    for cluster in range(keep):
        members = [int(e) for e in (labels == cluster).nonzero()[0]]
        centre = outputs[members].mean(0)
        far = {e: float((outputs[e] - centre).norm()) for e in members}
        often = {e: -float(layer.frequency[e]) for e in members}
        first, second = (often, far) if representative == "frequency" else (far, often)
        kept.append(min((first[e], second[e], e) for e in members)[-1])
    return kept
