"""A profile from the weights alone, for when nothing can be run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from proxies.checkpoint import Checkpoint
from proxies.families import Family, family_of_config
from proxies.profile import LayerProfile, Profile, calibration_digest
from proxies.watch import router_rows
from proxies.weights import SCALE

if TYPE_CHECKING:
    import torch

PACKED = ("U8", "I8", "U32", "I32")  # types of packed matrices, such as the blocks of MXFP4


def profile_of_weights(checkpoint: Checkpoint, norms: bool = True) -> Profile:
    """A profile for when nothing can be run: router rows, and norms of weights in place of what the experts do.

    Every expert counts as used once. Its saliency is the norm of its router row times the geometric mean of the
    Frobenius norms of its matrices: what its output would scale with for states of one size.

    Args:
        checkpoint: the opened folder.
        norms: whether to read the experts at all; otherwise their saliency is that of the router row alone.

    Raises:
        CheckpointError: a tensor holds NaN or infinity, or has a type that cannot be computed with.
    """
    import torch

    family = family_of_config(checkpoint.config)
    experts, layers = family.experts(checkpoint.config), {}
    logs = {layer: torch.zeros(experts, dtype=torch.float64) for layer in family.moe_layers(checkpoint.config)}
    count = {layer: torch.zeros(experts, dtype=torch.float64) for layer in logs}
    for layer, expert, squares in _expert_norms(checkpoint, family) if norms else ():
        logs[layer][expert] += squares.log() / 2
        count[layer][expert] += 1
    ones = torch.ones(experts, dtype=torch.float64)
    for layer in logs:
        router = router_rows(checkpoint, family, layer).double()[:experts]
        strength = (logs[layer] / count[layer].clamp(min=1)).exp() * router.norm(dim=1)
        layers[layer] = LayerProfile(router, ones, ones, torch.eye(experts, dtype=torch.float64), router, strength)
    return Profile(layers, 0, calibration_digest(None))


def _expert_norms(checkpoint: Checkpoint, family: Family) -> Iterator[tuple[int, Any, torch.Tensor]]:
    """Layer, expert (or all of them) and squared Frobenius norm(s) of every matrix of every expert."""
    from proxies.weights import read_values

    experts = family.experts(checkpoint.config)
    for name, info in checkpoint.tensors.items():
        place = None if family.beyond_the_layers(checkpoint.config, name) else family.place(name)
        if place is None or len(info.shape) < 2 or name == family.router_weight.format(layer=place[0]):
            continue
        if info.dtype in PACKED or name.endswith(SCALE):
            continue  # bytes of a packed format say nothing by themselves; a scale is read with its weight
        if place[1] is not None and place[1] < experts:
            yield (*place, read_values(checkpoint, name).double().square().sum())
        elif place[1] is None and len(info.shape) == 3:
            yield place[0], slice(None), read_values(checkpoint, name)[:experts].double().square().sum((1, 2))
