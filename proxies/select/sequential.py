"""Layer after layer: each is profiled behind the already pruned ones, so that it is chosen for what it will see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxies import select as selection
from proxies.profile import Profile

if TYPE_CHECKING:
    from proxies.search import SearchContext


def search(context: SearchContext, keep: int, *, seed: int, base: str = "facility") -> dict[int, list[int]]:
    """Choose each layer by the strategy `base`, on a profile taken behind the layers chosen before.

    Args:
        context: profile and whole model.
        keep: experts per layer.
        seed: for strategies that draw.
        base: strategy that chooses within a layer.
    """
    kept: dict[int, list[int]] = {}
    for layer in context.layers:
        behind = Profile({layer: context.profile_behind(layer, kept)}, context.profile.tokens, "")
        kept.update(selection.select(behind, keep, base, seed=seed, groups=context.groups))
    return kept
