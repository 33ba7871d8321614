"""Random experts: a floor to compare with."""

from __future__ import annotations

from proxies.profile import LayerProfile

NEEDS_PROFILE = False


def select(layer: LayerProfile, keep: int, *, seed: int, layer_index: int) -> list[int]:
    """Keep experts drawn without replacement, by seed and layer."""
    import numpy as np

    rng = np.random.default_rng([seed, layer_index])
    return [int(e) for e in rng.permutation(layer.experts)[:keep]]
