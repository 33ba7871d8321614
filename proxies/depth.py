"""Fewer decoder layers: for proxies that must fit one accelerator. Never the default, and recorded in the manifest.

Layers are ranked by block influence, 1 - cosine between the hidden states that enter and leave a layer, averaged over
tokens (arXiv 2403.03853, equation 1): a layer that hardly turns its input can go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from proxies.checkpoint import Checkpoint, CheckpointError, Cut
from proxies.families import Family, positive_int

_LAYER = re.compile(r"(.*?\blayers\.)(\d+)(\..*)")


def most_influential(influence: Mapping[int, float], keep: int) -> list[int]:
    """The layers to keep: the first and the last, and of the others those with the highest influence; sorted.

    Raises:
        CheckpointError: fewer than two layers, not fewer than there are, or influence that was not measured.
    """
    if not influence:
        raise CheckpointError(
            "layers can be dropped only by a profile on calibration text; their influence is unknown."
        )
    layers = sorted(influence)
    if not 2 <= keep < len(layers):
        raise CheckpointError(f"{keep} layers cannot be kept of {len(layers)}; keep at least 2 and fewer than all.")
    inner = sorted(layers[1:-1], key=lambda layer: (-influence[layer], layer))
    return sorted([layers[0], layers[-1], *inner[: keep - 2]])


def shallower(config: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """The configuration of the model with only these layers: their number, and every list that goes by layer."""
    count = positive_int(config, "num_hidden_layers")
    new = dict(config)
    new["num_hidden_layers"] = len(layers)
    for key, value in config.items():
        if key == "mlp_only_layers" and isinstance(value, list):
            new[key] = [position for position, layer in enumerate(layers) if layer in value]
        elif isinstance(value, list) and len(value) == count:
            new[key] = [value[layer] for layer in layers]
    if isinstance(first := config.get("first_k_dense_replace"), int):
        new["first_k_dense_replace"] = sum(layer < first for layer in layers)
    if isinstance(window := config.get("max_window_layers"), int):
        new["max_window_layers"] = sum(layer < window for layer in layers)
    return new


def without_layers(cuts: Sequence[Cut], layers: Sequence[int]) -> list[Cut]:
    """The cuts of the kept layers, renumbered; tensors outside the layers stay."""
    found = []
    for cut in cuts:
        match = _LAYER.fullmatch(cut.name)
        if match is None:
            found.append(cut)
        elif int(match[2]) in layers:
            found.append(replace(cut, name=f"{match[1]}{list(layers).index(int(match[2]))}{match[3]}"))
    return found


def check_shallower(checkpoint: Checkpoint, family: Family, config: Mapping[str, Any], cuts: Sequence[Cut]) -> None:
    """Refuse layers whose pattern the configuration cannot express, such as every second one dense.

    Raises:
        CheckpointError: the new configuration implies other tensors than were kept.
    """
    have = {cut.name: cut.shape for cut in cuts}
    for name, shape in family.shapes(config):
        if have.get(name) != tuple(shape):
            raise CheckpointError(
                f"{checkpoint.folder}: these layers cannot be dropped, since config.json cannot say so: it would imply "
                f"{name} {list(shape)}."
            )
