"""The experts that are chosen most often."""

from __future__ import annotations

from proxies.profile import LayerProfile


def select(layer: LayerProfile, keep: int, *, seed: int, layer_index: int) -> list[int]:
    """Keep the most frequently activated experts; ties go to the lower index."""
    return [int(e) for e in layer.frequency.argsort(descending=True, stable=True)[:keep]]
