"""The experts whose outputs weigh most in sum."""

from __future__ import annotations

from proxies.profile import LayerProfile


def select(layer: LayerProfile, keep: int, *, seed: int, layer_index: int) -> list[int]:
    """Keep the experts with the largest sum, over the tokens routed to them, of routing weight times output norm.

    Compare `reap`, which divides the sum by the number of those tokens.
    """
    return [int(e) for e in layer.saliency.argsort(descending=True, stable=True)[:keep]]
