"""The experts whose outputs weigh most when they are chosen (REAP, arXiv 2510.13999)."""

from __future__ import annotations

from proxies.profile import LayerProfile


def select(layer: LayerProfile, keep: int, *, seed: int, layer_index: int) -> list[int]:
    """Keep the experts with the largest mean, over the tokens routed to them, of routing weight times output norm.

    An expert that was never chosen scores zero. Compare `saliency`, which takes the sum.
    """
    score = layer.saliency / layer.frequency.clamp(min=1)
    return [int(e) for e in score.argsort(descending=True, stable=True)[:keep]]
