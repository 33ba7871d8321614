"""Which experts to keep. A strategy is one file in this package that defines ``select(layer, keep, ...)``.

``select(layer: LayerProfile, keep: int, *, seed: int, layer_index: int, **options) -> list[int]`` returns `keep`
different experts. Options are keyword-only parameters with defaults.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

from proxies.checkpoint import CheckpointError
from proxies.profile import Profile

Strategy = Callable[..., list[int]]
_FIXED = {"seed", "layer_index"}


@functools.cache
def strategies() -> dict[str, Strategy]:
    """All strategies of this package by name."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))
    return {name: importlib.import_module(f"{__name__}.{name}").select for name in names}


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
    return bool(getattr(sys.modules[strategy(name).__module__], "NEEDS_PROFILE", True))


def select(
    profile: Profile, keep: int, name: str, *, options: Mapping[str, Any] | None = None, seed: int = 0, groups: int = 1
) -> dict[int, list[int]]:
    """Choose the experts of every layer.

    Args:
        profile: what the experts do.
        keep: experts per layer.
        name: strategy.
        options: its options.
        seed: for strategies that draw.
        groups: equal consecutive groups of experts that must keep the same number each.

    Returns:
        Layer to the sorted original indices of the kept experts.

    Raises:
        CheckpointError: unknown strategy or option, a negative seed, or a strategy that broke its contract.
    """
    chosen, options = strategy(name), resolve(name, options)
    if seed < 0:
        raise CheckpointError(f"seed {seed} is negative.")
    kept = {}
    for index, layer in profile.layers.items():
        kept[index] = sorted(chosen(layer, keep, seed=seed, layer_index=index, **options))
        if (
            len(kept[index]) != keep
            or not set(kept[index]) <= set(range(layer.experts))
            or len(set(kept[index])) != keep
        ):
            raise CheckpointError(
                f"strategy {name} kept {kept[index]} in layer {index}, not {keep} different ones of {layer.experts}."
            )
    return kept


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
