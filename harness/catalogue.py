"""The catalogue of faults: the ``@fault`` decorator, the specification of a fault, and how faults are found.

Faults are found through the entry-point group ``harness.faults``. An entry names a package (searched whole) or a
module; third parties add theirs the same way. Importing a fault file must not import torch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from harness.claims import Claim
from harness.errors import UsageError, unknown
from harness.seams import Config, FaultRef, Schedule, Seam

GROUP = "harness.faults"
SECTIONS = ("What breaks", "In the wild", "Looks like")
F = TypeVar("F", bound=Callable[..., Any])
_REGISTERED: dict[str, FaultSpec] = {}


@dataclass(frozen=True)
class FaultSpec:
    """Everything that is known about a fault before it runs.

    Attributes:
        name: The function's name.
        family: The folder that the fault's file lies in.
        factory: ``factory(clean, **options) -> faulty``.
        seam: Where it attaches.
        mode: Mode in which it shows by default.
        seen_in: URLs of real reports.
        expects: Claims about the response.
        severity: Name of the option that says how badly; None if there is none.
        threshold: True if the fault does nothing until its severity trips it.
        moe: True if only a mixture-of-experts model can have it.
        engine: Engine that it needs; None for any.
        needs: Module roles or features that a model must have.
        look_alikes: Names of faults with a similar signature.
        control: True for a healthy arm (a null, or ``noop``): part of the experiment, not a failure.
    """

    name: str
    family: str
    factory: Callable[..., Callable[..., Any]]
    seam: Seam
    mode: Literal["replay", "free"]
    seen_in: tuple[str, ...]
    expects: tuple[Claim, ...]
    severity: str | None = None
    threshold: bool = False
    moe: bool = False
    engine: str | None = None
    needs: tuple[str, ...] = ()
    look_alikes: tuple[str, ...] = ()
    control: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """First line of the documentation."""
        return (inspect.getdoc(self.factory) or "").partition("\n")[0]

    @property
    def sections(self) -> dict[str, str]:
        """The documentation by section: ``What breaks``, ``In the wild``, ``Looks like``."""
        text = inspect.getdoc(self.factory) or ""
        parts = re.split(rf"^({'|'.join(SECTIONS)}):", text, flags=re.MULTILINE)
        return {title: " ".join(body.split()) for title, body in zip(parts[1::2], parts[2::2], strict=True)}

    @property
    def config(self) -> bool:
        """True if the fault rewrites the configuration, and so acts from the first step."""
        return isinstance(self.seam, Config)

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in defaults and check names and types of options.

        Raises:
            UsageError: For an unknown option or a value of the wrong type.
        """
        filled = dict(self.defaults)
        for name, value in given.items():
            if name not in filled:
                raise unknown(f"option of fault {self.name}:", name, filled)
            filled[name] = _as_type_of(self.name, name, value, filled[name])
        return filled

    def ref(self, options: Mapping[str, Any] | None = None, schedule: Schedule | None = None) -> FaultRef:
        """Return a checked reference to this fault, options filled in."""
        filled = tuple(sorted(self.options(options or {}).items()))
        return FaultRef(self.name, filled, schedule or Schedule())


def _as_type_of(fault: str, name: str, value: Any, default: Any) -> Any:
    kind = type(default)
    try:
        if kind is bool and isinstance(value, str):
            return {"true": True, "false": False, "1": True, "0": False}[value.lower()]
        if kind is bool and not isinstance(value, bool):
            raise ValueError
        if kind is int and (isinstance(value, bool) or float(value) != int(float(value))):
            raise ValueError
        return kind(float(value)) if kind is int else kind(value)
    except (ValueError, KeyError, TypeError, OverflowError):
        raise UsageError(
            f"option {name} of fault {fault} must be {kind.__name__} (default {default!r}), got {value!r}"
        ) from None


def fault(
    *,
    seam: Seam,
    seen_in: Sequence[str],
    expects: Sequence[Claim],
    mode: Literal["replay", "free"] = "replay",
    severity: str | None = None,
    threshold: bool = False,
    moe: bool = False,
    engine: str | None = None,
    needs: Sequence[str] = (),
    look_alikes: Sequence[str] = (),
    control: bool = False,
) -> Callable[[F], F]:
    """Register a fault; see ``FaultSpec`` for the arguments.

    The decorated function takes the clean callable and returns the faulty one. Its keyword-only parameters are the
    fault's options; each needs a default of type bool, int, float or str.

    Raises:
        TypeError: If the function's signature is not of that form.
        ValueError: If the severity is not one of its options, or the name is taken.
    """

    def register(function: F) -> F:
        name = function.__name__
        defaults: dict[str, Any] = {}
        first, *rest = inspect.signature(function).parameters.values()
        if first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
            raise TypeError(f"fault {name}: the first parameter must be the clean callable")
        for p in rest:
            if p.kind is not p.KEYWORD_ONLY or type(p.default) not in (bool, int, float, str):
                raise TypeError(f"fault {name}: option {p.name} must be keyword-only with a plain default")
            defaults[p.name] = p.default
        if severity is not None and severity not in defaults:
            raise ValueError(f"fault {name}: severity {severity!r} is not one of its options")
        known = _REGISTERED.get(name)
        if known is not None and known.factory.__module__ != function.__module__:
            raise ValueError(f"two faults are named {name}: {known.factory.__module__}, {function.__module__}")
        parts = function.__module__.split(".")
        _REGISTERED[name] = FaultSpec(
            name=name,
            family=parts[-2] if len(parts) > 1 else "other",
            factory=function,
            seam=seam,
            mode=mode,
            seen_in=tuple(seen_in),
            expects=tuple(expects),
            severity=severity,
            threshold=threshold,
            moe=moe,
            engine=engine,
            needs=tuple(needs),
            look_alikes=tuple(look_alikes),
            control=control,
            defaults=defaults,
        )
        return function

    return register


@functools.cache
def _discover() -> tuple[str, ...]:
    """Import every module that the entry points name; returns their names."""
    loaded = []
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: (e.name, e.value)):
        try:
            module = importlib.import_module(entry.module)
        except ImportError as e:
            raise UsageError(f"fault package {entry.value!r} ({entry.name}) cannot be imported: {e}") from e
        loaded.append(module.__name__)
        for info in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
            importlib.import_module(info.name)
            loaded.append(info.name)
    return tuple(loaded)


def catalogue() -> dict[str, FaultSpec]:
    """Return every fault by name, in alphabetical order."""
    _discover()
    return dict(sorted(_REGISTERED.items()))


def find(name: str) -> FaultSpec:
    """Return one fault.

    Raises:
        UsageError: If there is none of that name; the nearest names are in the message.
    """
    known = catalogue()
    if name not in known:
        raise unknown("fault", name, (n for n, spec in known.items() if not spec.control or n == "noop"))
    return known[name]
