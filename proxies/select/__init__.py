"""Which experts to keep. A strategy is one file in this package that defines ``select`` or ``search``.

``select(layer: LayerProfile, keep: int, *, seed: int, layer_index: int, **options) -> list[int]`` chooses within one
layer and returns `keep` different experts. ``search(context: SearchContext, keep: int, *, seed: int, **options) ->
dict[int, list[int]]`` chooses for the whole model, which it may try selections on. Options are keyword-only parameters
with defaults. A file that needs the experts' outputs (`LayerProfile.mean_output` and what follows it) says
``NEEDS_OUTPUTS = True``.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from proxies.checkpoint import CheckpointError
from proxies.profile import LayerProfile, Profile

if TYPE_CHECKING:
    import torch

    from proxies.search import SearchContext

Strategy = Callable[..., Any]
_FIXED = {"seed", "layer_index"}


@functools.cache
def strategies() -> dict[str, Strategy]:
    """All strategies of this package by name."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in names}
    return {name: m.search if hasattr(m, "search") else m.select for name, m in modules.items()}


def searches(name: str) -> bool:
    """Whether a strategy tries selections on the whole model."""
    return strategy(name).__name__ == "search"


def needs_outputs(name: str) -> bool:
    """Whether a strategy needs a profile with the experts' outputs."""
    return _says(name, "NEEDS_OUTPUTS", default=False)


def _says(name: str, what: str, *, default: bool) -> bool:
    """What the file of a strategy says about itself."""
    return bool(getattr(sys.modules[strategy(name).__module__], what, default))


def needed(value: torch.Tensor | None, name: str) -> torch.Tensor:
    """A field of a profile that strategy `name` cannot do without.

    Raises:
        CheckpointError: the profile was taken without the experts' outputs.
    """
    if value is None:
        raise CheckpointError(f"strategy {name} needs the experts' outputs, which the profile does not hold.")
    return value


def strategy(name: str) -> Strategy:
    """The strategy of a name.

    Raises:
        CheckpointError: it is unknown; the message names the nearest known ones.
    """
    known = strategies()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or sorted(known)
        raise CheckpointError(f"strategy {name!r} does not exist; the nearest are: {', '.join(near)}.")
    return known[name]


def needs_profile(name: str) -> bool:
    """Say whether a strategy looks at more than the number of experts: not if its file has NEEDS_PROFILE = False."""
    return _says(name, "NEEDS_PROFILE", default=True)


def select(
    profile: Profile,
    keep: int,
    name: str,
    *,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    groups: int = 1,
    group_top: int = 1,
    context: Callable[[], SearchContext] | None = None,
) -> dict[int, list[int]]:
    """Choose the experts of every layer.

    Args:
        profile: what the experts do.
        keep: experts per layer.
        name: strategy.
        options: its options.
        seed: for strategies that draw.
        groups: equal consecutive groups of experts that must keep the same number each.
        group_top: experts whose scores rank a group, and which it must keep.
        context: called for a strategy that searches, and only then: gives the whole model to try selections on.

    Returns:
        Layer to the sorted original indices of the kept experts.

    Raises:
        CheckpointError: unknown strategy or option, a negative seed, a number that groups cannot share, a search
            without a model, or a strategy that broke its contract.
    """
    chosen, options = strategy(name), resolve(name, options)
    if seed < 0:
        raise CheckpointError(f"seed {seed} is negative.")
    if keep % groups:
        raise CheckpointError(f"{keep} experts cannot be kept: the router's {groups} groups must keep the same number.")
    if groups > 1 and keep < group_top * groups:
        raise CheckpointError(f"{keep} experts cannot be kept: each of the router's {groups} groups needs {group_top}.")
    if searches(name):
        if context is None:
            raise CheckpointError(f"strategy {name} tries selections on the model, and none was given.")
        found = chosen(context(), keep, seed=seed, **options)
    else:
        found = {
            index: _within_groups(chosen, layer, keep, groups, seed=seed, layer_index=index, **options)
            for index, layer in profile.layers.items()
        }
    return {index: _checked(found[index], keep, groups, layer, name, index) for index, layer in profile.layers.items()}


def _within_groups(chosen: Strategy, layer: LayerProfile, keep: int, groups: int, **options: Any) -> list[int]:
    """Choose in each group as if it were a layer of its own."""
    if groups == 1:
        return list(chosen(layer, keep, **options))
    size = layer.experts // groups
    kept = []
    for group in range(groups):
        members = list(range(group * size, (group + 1) * size))
        seed = {"seed": options["seed"] * groups + group}
        kept += [members[e] for e in chosen(layer.part(members), keep // groups, **{**options, **seed})]
    return kept


def _checked(kept: list[int], keep: int, groups: int, layer: LayerProfile, name: str, index: int) -> list[int]:
    size = layer.experts // groups
    counts = [sum(e // size == group for e in kept) for group in range(groups)]
    if len(set(kept)) != keep or not set(kept) <= set(range(layer.experts)) or set(counts) != {keep // groups}:
        raise CheckpointError(
            f"strategy {name} kept {sorted(kept)} in layer {index}, not {keep} different ones of {layer.experts}"
            + (f", {keep // groups} in each of {groups} groups." if groups > 1 else ".")
        )
    return sorted(kept)


def resolve(name: str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All options of a strategy: the defaults of its signature, with those given in their place.

    Raises:
        CheckpointError: unknown strategy or option, or a value of another type than the default's.
    """
    parameters = inspect.signature(strategy(name)).parameters.values()
    values = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in _FIXED}
    for option, value in (options or {}).items():
        if option not in values:
            raise CheckpointError(
                f"strategy {name} has no option {option!r}; it has: {', '.join(sorted(values)) or 'none'}."
            )
        kind = type(values[option])
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise CheckpointError(f"option {option} of strategy {name} is {value!r}, but a {kind.__name__} is needed.")
        values[option] = kind(value)
    return values
