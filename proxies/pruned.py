"""A model in memory whose layers can be cut to some of their experts and made whole again; nothing is written."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from proxies.checkpoint import CheckpointError
from proxies.families import Family

if TYPE_CHECKING:
    import torch


class PrunedModel:
    """Swaps the mixture-of-experts block of a layer for one with fewer experts.

    The smaller block is built by transformers from the configuration with fewer experts, so it routes as the loaded
    proxy will, and is filled with the kept slices of the whole block's tensors. The whole blocks stay in memory.

    Attributes:
        model: the model; it runs with whatever `keep` asked for last.
        family: its architecture.
    """

    def __init__(self, model: Any, family: Family) -> None:
        self.model, self.family = model, family
        self._names = _block_names(model, family)
        self._whole = {layer: model.get_submodule(name) for layer, name in self._names.items()}
        self._now: dict[int, tuple[int, ...] | None] = dict.fromkeys(self._names)
        self._skeletons: dict[int, Any] = {}

    @property
    def layers(self) -> list[int]:
        """Layers that have experts."""
        return sorted(self._names)

    def keep(self, kept: Mapping[int, Sequence[int]]) -> None:
        """Cut layers to the experts given, in that order; a layer that is not named is made whole."""
        for layer, name in self._names.items():
            wanted = tuple(kept[layer]) if layer in kept else None
            if wanted == self._now[layer]:
                continue
            block = self._whole[layer] if wanted is None else self._block(layer, wanted)
            parent, _, attribute = name.rpartition(".")
            setattr(self.model.get_submodule(parent), attribute, block)
            self._now[layer] = wanted

    def _block(self, layer: int, kept: tuple[int, ...]) -> Any:
        import torch

        block = copy.deepcopy(self._skeleton(len(kept)).get_submodule(self._names[layer]))
        whole = self._whole[layer]
        index = torch.tensor(kept)
        for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]:
            owner, _, attribute = name.rpartition(".")
            module = block.get_submodule(owner)
            table = module._parameters if attribute in module._parameters else module._buffers
            table[attribute] = _slice(tensor, table[attribute].shape, index, f"{self._names[layer]}.{name}")
        return block.eval()

    def _skeleton(self, experts: int) -> Any:
        """The same architecture with so many experts, without memory."""
        import torch
        from transformers import AutoModelForCausalLM

        if experts not in self._skeletons:
            config = self.model.config
            smaller = type(config).from_dict(self.family.with_experts(config.to_dict(), experts))
            with torch.device("meta"):
                skeleton = AutoModelForCausalLM.from_config(smaller, attn_implementation=config._attn_implementation)
            for attribute in ("_experts_implementation",):
                setattr(skeleton.config, attribute, getattr(config, attribute))
            self._skeletons[experts] = skeleton
        return self._skeletons[experts]


def _slice(tensor: Any, shape: torch.Size, index: torch.Tensor, name: str) -> Any:
    """The tensor itself if its shape is the one wanted, else the rows of the kept experts."""
    import torch

    if tensor.shape == shape:
        return tensor
    if (len(index), *tensor.shape[1:]) != tuple(shape):
        raise CheckpointError(
            f"{name} is {list(tensor.shape)} and cannot be cut to {list(shape)} by its first dimension."
        )
    rows = tensor.detach().index_select(0, index.to(tensor.device))
    return torch.nn.Parameter(rows, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else rows


def _block_names(model: Any, family: Family) -> dict[int, str]:
    """By layer, the name of the smallest module that holds both the router and the experts."""
    found: dict[int, dict[str, str]] = {}
    for name, _ in model.named_modules():
        for role in ("router", "experts"):
            if match := re.fullmatch(family.roles[role], name):
                found.setdefault(int(match["layer"]), {})[role] = name
    names = {}
    for layer, roles in sorted(found.items()):
        pairs = zip(roles["router"].split("."), roles["experts"].split("."), strict=False)
        shared = 0
        for left, right in pairs:
            if left != right:
                break
            shared += 1
        names[layer] = ".".join(roles["router"].split(".")[:shared])
    if not names:
        raise CheckpointError(f"the {family.model_type} model has no layer with experts.")
    return names
