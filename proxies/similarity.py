"""How close a proxy stays to its original inside: routing, use of experts and hidden states, layer by layer.

These are the three factors on the model's side that reproduction depends on (arXiv 2608.10823). Both models run with
one layer in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxies.checkpoint import Checkpoint
from proxies.families import family_of_config
from proxies.layerwise import Layerwise
from proxies.profile import Batches, modules_by_layer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LayerSimilarity:
    """One decoder layer of the proxy beside the same layer of the original, on the same text.

    Attributes:
        layer: index of the layer in the original.
        kept_mass: share of the original's routing weight that goes to experts which were kept, in [0, 1]; None for a
            layer without experts.
        load_overlap: 1 - total variation distance between the loads of the kept experts in both, in [0, 1].
        load_entropy: entropy of the load over experts, divided by its largest value, of original and proxy, in [0, 1].
        hidden_cosine: mean cosine between the hidden states that leave the layer in both, in [-1, 1].
    """

    layer: int
    kept_mass: float | None
    load_overlap: float | None
    load_entropy: tuple[float, float] | None
    hidden_cosine: float


class _Watch:
    """Collects the load of every expert and the hidden states after every layer."""

    def __init__(self, folder: Path, batches: Batches) -> None:
        checkpoint = Checkpoint.open(folder)
        family = family_of_config(checkpoint.config)
        self._batches, self._runner = batches, Layerwise(checkpoint)
        self._experts = modules_by_layer(self._runner.model, family, "experts")
        self._count = family.experts(checkpoint.config)
        self.weight: dict[int, torch.Tensor] = {}
        self.load: dict[int, torch.Tensor] = {}
        self.states: dict[int, list[torch.Tensor]] = {}
        self._runner.run(batches, self._visit, leave=self._leave)

    @contextmanager
    def _visit(self, layer: int, _module: Any) -> Iterator[None]:
        import torch

        if layer not in self._experts:
            yield
            return
        self.weight[layer] = torch.zeros(self._count, dtype=torch.float64)
        self.load[layer] = torch.zeros(self._count, dtype=torch.float64)
        handle = self._experts[layer].register_forward_pre_hook(lambda _m, args: self._enter(layer, args))
        try:
            yield
        finally:
            handle.remove()

    def _keep(self) -> torch.Tensor:
        import torch

        tokens, mask = self._batches[self._runner.batch]
        return (torch.ones_like(tokens) if mask is None else mask).reshape(-1).bool()

    def _enter(self, layer: int, args: tuple[Any, ...]) -> None:
        import torch

        _, chosen, weights = args
        keep = self._keep()
        flat = chosen[keep].flatten()
        real = flat < self._count  # an expert that computes nothing has a number beyond
        self.weight[layer].scatter_add_(0, flat[real], weights[keep].double().flatten()[real])
        self.load[layer] += torch.bincount(flat[real], minlength=self._count)

    def _leave(self, layer: int, _entered: Any, out: Any) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        self.states.setdefault(layer, []).append(hidden.flatten(0, 1)[self._keep()].float())


def similarity(
    original: Path,
    proxy: Path,
    kept: Mapping[int, list[int]],
    batches: Batches,
    layers: Sequence[int] | None = None,
) -> list[LayerSimilarity]:
    """Compare a proxy with its original on sample text.

    Args:
        original: checkpoint folder.
        proxy: checkpoint folder cut from it.
        kept: layer of the original to the original indices of the kept experts, in the proxy's order.
        batches: `(tokens [B, T] int64, attention_mask [B, T] or None)`. The hidden states of all layers of the original
            are held in memory, so a few hundred tokens are enough.
        layers: layers of the original that the proxy has, in order; None for all.

    Raises:
        CheckpointError: one of the models cannot be run layer by layer.
    """
    large, small = _Watch(original, batches), _Watch(proxy, batches)
    return [
        _compared(large, small, layer, position, kept)
        for position, layer in enumerate(sorted(large.states) if layers is None else layers)
    ]


def _compared(
    large: _Watch, small: _Watch, layer: int, position: int, kept: Mapping[int, list[int]]
) -> LayerSimilarity:
    """Layer `layer` of the original beside layer `position` of the proxy."""
    import torch

    pairs = zip(large.states[layer], small.states[position], strict=True)
    cosine = torch.cat([torch.nn.functional.cosine_similarity(a, b, dim=-1) for a, b in pairs]).double().mean()
    if layer not in large.load:
        return LayerSimilarity(layer, None, None, None, float(cosine))
    weight, load, other = large.weight[layer], large.load[layer], small.load[position]
    share = load[kept[layer]] / load[kept[layer]].sum().clamp(min=1)
    overlap = 1 - float((share - other / other.sum()).abs().sum()) / 2
    mass = float(weight[kept[layer]].sum() / weight.sum())
    return LayerSimilarity(layer, mass, overlap, (_entropy(load), _entropy(other)), float(cosine))


def _entropy(load: torch.Tensor) -> float:
    import torch

    share = load / load.sum()
    return float(torch.special.entr(share).sum()) / math.log(len(load)) if len(load) > 1 else 1.0
