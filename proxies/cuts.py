"""What of a checkpoint a proxy keeps: the one place that says which bytes go where."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from proxies.checkpoint import Checkpoint, CheckpointError, Cut, TensorInfo
from proxies.depth import without_layers
from proxies.families import Family


def check_request(checkpoint: Checkpoint, family: Family, experts: int) -> None:
    """Refuse a number of experts that the model cannot have.

    Raises:
        CheckpointError: fewer than are chosen per token, not fewer than there are, or not the same number in every
            group, with enough of them to rank the group and to choose from the groups that are chosen.
    """
    config = checkpoint.config
    have, top_k = family.experts(config), family.top_k(config)
    if experts < top_k:
        raise CheckpointError(f"{experts} experts cannot be kept: {family.top_k_key} = {top_k} are chosen per token.")
    if experts >= have:
        raise CheckpointError(f"{experts} experts cannot be kept: {checkpoint.folder} has {have}, keep fewer.")
    groups = family.groups(config)
    if groups == 1 or family.group_keys is None:
        return
    group_key, chosen_key = family.group_keys
    if have % groups or experts % groups:
        odd = have if have % groups else experts
        raise CheckpointError(f"{experts} experts cannot be kept: {odd} is not a multiple of {group_key} = {groups}.")
    each, chosen = experts // groups, int(config.get(chosen_key) or groups)
    if each < family.group_top:
        least = groups * family.group_top
        raise CheckpointError(
            f"{experts} experts cannot be kept: {group_key} = {groups} groups are ranked by their {family.group_top} "
            f"best experts, keep at least {least}."
        )
    if each * chosen < top_k:
        raise CheckpointError(
            f"{experts} experts cannot be kept: {chosen_key} = {chosen} groups of {each} hold fewer than the {top_k} "
            f"chosen per token."
        )


def cuts(
    checkpoint: Checkpoint, family: Family, kept: Mapping[int, list[int]], layers: Sequence[int] | None = None
) -> list[Cut]:
    """The tensors of the proxy: kept experts renumbered, router rows sliced, everything else as it is.

    Layers after the last (multi-token prediction) are left out.

    Args:
        checkpoint: the original.
        family: its family.
        kept: layer to the experts that are kept, in order.
        layers: layers that are kept; None for all.
    """
    experts, result = family.experts(checkpoint.config), []
    for name, info in checkpoint.tensors.items():
        if family.beyond_the_layers(checkpoint.config, name):
            continue
        place = family.place(name)
        if place is None:
            result.append(Cut(name, info))
        elif place[1] is None:
            result.append(_rows(checkpoint, family, info, kept[place[0]]))
        elif place[1] >= experts:  # one that computes nothing
            result.append(Cut(family.rename(name, place[1] - experts + len(kept[place[0]])), info))
        elif place[1] in kept[place[0]]:
            result.append(Cut(family.rename(name, kept[place[0]].index(place[1])), info))
    return result if layers is None else without_layers(result, layers)


def _rows(checkpoint: Checkpoint, family: Family, info: TensorInfo, kept: list[int]) -> Cut:
    """Keep the rows of some experts, and those beyond the experts, which compute nothing."""
    axis = 1 if re.fullmatch(family.expert_columns, info.name) else 0
    experts = family.experts(checkpoint.config)
    count = info.shape[axis]
    if count < experts:
        raise CheckpointError(
            f"{info.file}: tensor {info.name} {list(info.shape)} has fewer rows than {experts} experts."
        )
    return Cut(info.name, info, (*kept, *range(experts, count)), axis)
