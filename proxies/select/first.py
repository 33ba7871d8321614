"""The first experts: a floor to compare with."""

from __future__ import annotations

from proxies.profile import LayerProfile

NEEDS_PROFILE = False


def select(layer: LayerProfile, keep: int, *, seed: int, layer_index: int) -> list[int]:
    """Keep experts 0 to `keep` - 1."""
    return list(range(keep))
