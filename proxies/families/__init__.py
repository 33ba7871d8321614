"""Where each architecture keeps its experts, on disk and in memory.

A family is one file in this package that defines `FAMILY`; it is found by its `model_type`. On disk a family is
described by regular expressions over tensor names, in memory by regular expressions over the names of
`named_modules()` and `named_parameters()` as transformers builds them. All are matched in full (`re.fullmatch`).
"""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from proxies.checkpoint import CheckpointError

ROLES = ("router", "experts", "norm", "attention", "rotary", "head", "embedding")
NOTHING = r"(?!)"  # matches no name
PARAM_GROUPS = ("router", "experts", "attention", "norms", "embedding")


Shapes = Iterator[tuple[str, tuple[int, ...]]]
_LAYER_NUMBER = re.compile(r".*?\blayers\.(\d+)\..*")


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        model_type: `model_type` of config.json.
        expert_tensor: on-disk names of per-expert tensors, with the groups `layer` and `expert`.
        expert_rows: on-disk names of tensors whose first dimension counts experts (router rows, fused experts), group
            `layer`. Rows beyond the number of experts belong to experts that compute nothing; they are all kept.
        expert_columns: on-disk names of tensors [1, E], group `layer`.
        router_weight: on-disk name of the router matrix [E, H] as a format string over `layer`.
        count_keys: spellings of the number of experts in config.json.
        top_k_key: spelling of the number of experts per token.
        group_keys: spellings of the number of groups that experts are chosen in, and of groups chosen per token.
        group_top: experts whose scores rank a group; a group must keep at least so many.
        scoring: `softmax` or `sigmoid`: what the router makes of its logits.
        shapes: config to the on-disk name and shape of every tensor that a checkpoint must have, one at a time, so
            that an absurd count in a damaged config costs nothing.
        spare_tensors: on-disk names that a checkpoint may hold although the model does not read them.
        roles: role (`ROLES`) to module names; `router` and `experts` have the group `layer`.
        param_groups: group (`PARAM_GROUPS`) to parameter names; every parameter is in exactly one group.
        tiny: a configuration with 8 experts, small enough for a test of milliseconds.
    """

    model_type: str
    expert_tensor: str
    expert_rows: str
    router_weight: str
    count_keys: tuple[str, ...]
    top_k_key: str
    shapes: Callable[[Mapping[str, Any]], Shapes]
    spare_tensors: str
    roles: dict[str, str]
    param_groups: dict[str, str]
    expert_columns: str = NOTHING
    group_keys: tuple[str, str] | None = None
    group_top: int = 1
    scoring: str = "softmax"
    tiny: Mapping[str, Any] = field(default_factory=dict)

    def moe_layers(self, config: Mapping[str, Any]) -> list[int]:
        """Indices of the layers that have experts."""
        found = (re.fullmatch(self.expert_rows, name) for name, _ in self.shapes(config))
        return sorted({int(match["layer"]) for match in found if match})

    def groups(self, config: Mapping[str, Any]) -> int:
        """Number of groups that experts are chosen in; each must keep the same number of experts."""
        return 1 if self.group_keys is None else positive_int(config, self.group_keys[0], 1)

    def beyond_the_layers(self, config: Mapping[str, Any], name: str) -> bool:
        """Whether a tensor belongs to a layer after the last (multi-token prediction); such layers are not kept."""
        match, count = _LAYER_NUMBER.fullmatch(name), config.get("num_hidden_layers")
        return match is not None and isinstance(count, int) and int(match[1]) >= count

    def experts(self, config: Mapping[str, Any]) -> int:
        """Number of routed experts per layer; raises CheckpointError if absent or contradictory."""
        found = {key: positive_int(config, key) for key in self.count_keys if key in config}
        if not found:
            raise CheckpointError(f"config.json has no number of experts (looked for {', '.join(self.count_keys)}).")
        if len(set(found.values())) > 1:
            said = " and ".join(f"{key} = {value}" for key, value in found.items())
            raise CheckpointError(f"config.json contradicts itself on the number of experts: {said}.")
        return next(iter(found.values()))

    def top_k(self, config: Mapping[str, Any]) -> int:
        """Number of experts chosen per token."""
        return positive_int(config, self.top_k_key)

    def with_experts(self, config: Mapping[str, Any], experts: int) -> dict[str, Any]:
        """The configuration of the same model with `experts` experts, in the spelling found."""
        new = {key: experts if key in self.count_keys else value for key, value in config.items()}
        return {key: 0 if key == "num_nextn_predict_layers" else value for key, value in new.items()}

    def place(self, name: str) -> tuple[int, int | None] | None:
        """Layer and expert of an on-disk tensor; expert None for tensors with one row per expert.

        Returns:
            None if the number of experts does not touch the tensor.
        """
        if match := re.fullmatch(self.expert_tensor, name):
            return int(match["layer"]), int(match["expert"])
        match = re.fullmatch(self.expert_rows, name) or re.fullmatch(self.expert_columns, name)
        return None if match is None else (int(match["layer"]), None)

    def rename(self, name: str, expert: int) -> str:
        """The on-disk name of a per-expert tensor after its expert was renumbered to `expert`."""
        match = re.fullmatch(self.expert_tensor, name)
        if match is None:
            raise CheckpointError(f"tensor {name} does not belong to one expert of a {self.model_type} model.")
        return name[: match.start("expert")] + str(expert) + name[match.end("expert") :]


def positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """`config[key]` as an integer of at least one; raises CheckpointError naming the key and the value."""
    value = config.get(key, default)
    if value is None:
        raise CheckpointError(f"config.json has no {key}.")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key} = {value!r} where a positive integer is needed.")
    return value


@functools.cache
def families() -> dict[str, Family]:
    """All families of this package by `model_type`, in order of name."""
    found = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        if not module.startswith("_"):
            family: Family = importlib.import_module(f"{__name__}.{module}").FAMILY
            found[family.model_type] = family
    return found


def family_of(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises:
        CheckpointError: it is unknown; the message names the nearest known ones.
    """
    known = families()
    if model_type in known:
        return known[model_type]
    near = difflib.get_close_matches(str(model_type), known, n=3, cutoff=0.6) or sorted(known)
    raise CheckpointError(f"model_type {model_type!r} is not a known family; the nearest are: {', '.join(near)}.")


def family_of_config(config: Mapping[str, Any]) -> Family:
    """The family named by a config.json.

    Raises:
        CheckpointError: no model_type, a dense model, or an unknown family.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"config.json: model_type = {model_type!r} where the name of an architecture is needed.")
    if model_type not in families() and not any("expert" in key or "moe" in key for key in config):
        raise CheckpointError(
            f"model_type {model_type!r} is not a mixture-of-experts model: config.json names no experts."
        )
    return family_of(model_type)
