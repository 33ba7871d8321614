"""The experts whose outputs weigh most."""

from __future__ import annotations

from proxies.profile import LayerProfile


def select(layer: LayerProfile, keep: int, *, seed: int, layer_index: int, mean: bool = False) -> list[int]:
    """Keep the experts with the largest sum of routing weight times output norm.

    With `mean` the sum is divided by the number of routed tokens: the criterion of REAP (arXiv 2510.13999).
    """
    score = layer.saliency / layer.frequency.clamp(min=1) if mean else layer.saliency
    return [int(e) for e in score.argsort(descending=True, stable=True)[:keep]]
