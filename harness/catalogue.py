"""The catalogue: the ``@fault`` and ``@remedy`` decorators, what is known about each entry, and how entries are found.

Faults are found through the entry-point group ``harness.faults``, remedies through ``harness.remedies``. An entry point
names a package (searched whole) or a module; third parties add theirs the same way. Importing such a file must not
import torch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from harness.claims import Claim
from harness.errors import UsageError, unknown
from harness.seams import Config, FaultRef, Schedule, Seam

GROUP = "harness.faults"
REMEDY_GROUP = "harness.remedies"
SECTIONS = ("What breaks", "In the wild", "Looks like")
REMEDY_SECTIONS = ("What it does", "In the wild", "What it costs")
PAIR = "tiny-qwen3-moe"
Verdict = Literal["REPRODUCED", "PARTIAL", "NOT_REPRODUCED", "INCONCLUSIVE", "NO_EFFECT"]
VERDICTS: tuple[Verdict, ...] = ("REPRODUCED", "PARTIAL", "NOT_REPRODUCED", "INCONCLUSIVE", "NO_EFFECT")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """What is known about a fault, or a remedy, before it runs.

    Attributes:
        name: The function's name.
        family: The folder that its file lies in.
        factory: ``factory(clean, **options) -> faulty``.
        seam: Where it attaches.
        mode: Mode in which it shows by default.
        seen_in: URLs of real reports.
        engine: Engine that it needs; None for any.
        needs: Module roles or features that a model must have.
        control: True for a healthy arm (a null, or ``noop``): part of the experiment, not a failure.
        defaults: Options and their defaults.
    """

    kind: ClassVar[str]
    titles: ClassVar[tuple[str, ...]]

    name: str
    family: str
    factory: Callable[..., Callable[..., Any]]
    seam: Seam
    mode: Literal["replay", "free"]
    seen_in: tuple[str, ...]
    _: KW_ONLY
    engine: str | None = None
    needs: tuple[str, ...] = ()
    control: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """First line of the documentation."""
        return (inspect.getdoc(self.factory) or "").partition("\n")[0]

    @property
    def sections(self) -> dict[str, str]:
        """The documentation by section, for example ``What breaks``, ``In the wild``, ``Looks like``."""
        text = inspect.getdoc(self.factory) or ""
        parts = re.split(rf"^({'|'.join(self.titles)}):", text, flags=re.MULTILINE)
        return {title: " ".join(body.split()) for title, body in zip(parts[1::2], parts[2::2], strict=True)}

    @property
    def config(self) -> bool:
        """True if it rewrites the configuration, and so acts from the first step."""
        return isinstance(self.seam, Config)

    @property
    def source(self) -> str:
        """The file that defines it."""
        code: Any = self.factory.__code__
        return str(code.co_filename)

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in defaults and check names and types of options.

        Raises:
            UsageError: For an unknown option or a value of the wrong type.
        """
        filled = dict(self.defaults)
        for name, value in given.items():
            if name not in filled:
                raise unknown(f"option of {self.kind} {self.name}:", name, filled)
            filled[name] = _as_type_of(f"{self.kind} {self.name}", name, value, filled[name])
        return filled

    def ref(self, options: Mapping[str, Any] | None = None, schedule: Schedule | None = None) -> FaultRef:
        """Return a checked reference to this entry, options filled in."""
        filled = tuple(sorted(self.options(options or {}).items()))
        return FaultRef(self.name, filled, schedule or Schedule())


@dataclass(frozen=True)
class FaultSpec(Entry):
    """Everything that is known about a fault before it runs.

    Attributes:
        expects: Claims about the response.
        severity: Name of the option that says how badly; None if there is none.
        threshold: True if the fault does nothing until its severity trips it.
        moe: True if only a mixture-of-experts model can have it.
        look_alikes: Names of faults with a similar signature.
        remedy: Name of the remedy that its reports settled on; None if only removing the fault helps, or if it is
            for the remedies to say (``remedy_for``).
        pair: Pair on which it is shown.
        expected_verdict: What an experiment on that pair says at the defaults.
        reason: Measured reason, where a proxy cannot show the fault; empty where it is REPRODUCED.
    """

    kind: ClassVar[str] = "fault"
    titles: ClassVar[tuple[str, ...]] = SECTIONS

    expects: tuple[Claim, ...]
    _: KW_ONLY
    severity: str | None = None
    threshold: bool = False
    moe: bool = False
    look_alikes: tuple[str, ...] = ()
    remedy: str | None = None
    pair: str = PAIR
    expected_verdict: Verdict = "REPRODUCED"
    reason: str = ""


@dataclass(frozen=True)
class RemedySpec(Entry):
    """A change that makes a symptom go away without removing the fault.

    Attributes:
        for_: Names of the faults whose clean response it was seen to give back, or whose reports settled on it; empty
            if there is none in the catalogue.
    """

    kind: ClassVar[str] = "remedy"
    titles: ClassVar[tuple[str, ...]] = REMEDY_SECTIONS

    for_: tuple[str, ...]


_REGISTERED: dict[str, FaultSpec] = {}
_REMEDIES: dict[str, RemedySpec] = {}


def _as_type_of(owner: str, name: str, value: Any, default: Any) -> Any:
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
            f"option {name} of {owner} must be {kind.__name__} (default {default!r}), got {value!r}"
        ) from None


def _described(kind: str, function: Callable[..., Any], known: Mapping[str, Entry]) -> dict[str, Any]:
    """Return what a decorated function says about itself: name, family, factory and defaults of its options."""
    name = function.__name__
    defaults: dict[str, Any] = {}
    first, *rest = inspect.signature(function).parameters.values()
    if first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        raise TypeError(f"{kind} {name}: the first parameter must be the clean callable")
    for p in rest:
        if p.kind is not p.KEYWORD_ONLY or type(p.default) not in (bool, int, float, str):
            raise TypeError(f"{kind} {name}: option {p.name} must be keyword-only with a plain default")
        defaults[p.name] = p.default
    other = known.get(name)
    if other is not None and other.factory.__module__ != function.__module__:
        several = "remedies" if kind == "remedy" else "faults"
        raise ValueError(f"two {several} are named {name}: {other.factory.__module__}, {function.__module__}")
    parts = function.__module__.split(".")
    family = parts[-2] if len(parts) > 1 else "other"
    return {"name": name, "family": family, "factory": function, "defaults": defaults}


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
    remedy: str | None = None,
    pair: str = PAIR,
    expected_verdict: Verdict | None = None,
    reason: str = "",
) -> Callable[[F], F]:
    """Register a fault; see ``FaultSpec`` for the arguments.

    The decorated function takes the clean callable and returns the faulty one. Its keyword-only parameters are the
    fault's options; each needs a default of type bool, int, float or str. The verdict that is expected is REPRODUCED,
    and NO_EFFECT for a control, unless another is given with its reason.

    Raises:
        TypeError: If the function's signature is not of that form.
        ValueError: If the severity is not one of its options, the name is taken, there is no such verdict, or a verdict
            other than REPRODUCED comes without its reason.
    """

    def register(function: F) -> F:
        about = _described("fault", function, _REGISTERED)
        name = about["name"]
        if severity is not None and severity not in about["defaults"]:
            raise ValueError(f"fault {name}: severity {severity!r} is not one of its options")
        if expected_verdict is not None and expected_verdict not in VERDICTS:
            raise ValueError(f"fault {name}: no verdict {expected_verdict!r}; known: {', '.join(VERDICTS)}")
        if expected_verdict not in (None, "REPRODUCED") and not reason:
            raise ValueError(f"fault {name}: expected_verdict {expected_verdict} needs its measured reason")
        _REGISTERED[name] = FaultSpec(
            **about,
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
            remedy=remedy,
            pair=pair,
            expected_verdict=expected_verdict or ("NO_EFFECT" if control else "REPRODUCED"),
            reason=reason,
        )
        return function

    return register


def remedy(
    *,
    seam: Seam,
    for_: Sequence[str],
    seen_in: Sequence[str],
    mode: Literal["replay", "free"] = "replay",
    engine: str | None = None,
    needs: Sequence[str] = (),
) -> Callable[[F], F]:
    """Register a remedy; see ``RemedySpec`` for the arguments.

    The decorated function has the form of a fault: it takes the callable that is in force, faulty or not, and returns
    the one that is to stand in its place. It is installed last, around the fault.

    Raises:
        TypeError: If the function's signature is not of that form.
        ValueError: If the name is taken.
    """

    def register(function: F) -> F:
        about = _described("remedy", function, _REMEDIES)
        _REMEDIES[about["name"]] = RemedySpec(
            **about,
            seam=seam,
            mode=mode,
            seen_in=tuple(seen_in),
            engine=engine,
            needs=tuple(needs),
            for_=tuple(for_),
        )
        return function

    return register


@functools.cache
def _discover() -> tuple[str, ...]:
    """Import every module that the entry points name; returns their names."""
    loaded = []
    entries = [e for group in (GROUP, REMEDY_GROUP) for e in importlib.metadata.entry_points(group=group)]
    for entry in sorted(entries, key=lambda e: (e.group, e.name, e.value)):
        try:
            module = importlib.import_module(entry.module)
        except ImportError as e:
            kind = "fault" if entry.group == GROUP else "remedy"
            raise UsageError(f"{kind} package {entry.value!r} ({entry.name}) cannot be imported: {e}") from e
        loaded.append(module.__name__)
        for info in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
            importlib.import_module(info.name)
            loaded.append(info.name)
    return tuple(loaded)


def catalogue() -> dict[str, FaultSpec]:
    """Return every fault by name, in alphabetical order."""
    _discover()
    return dict(sorted(_REGISTERED.items()))


def remedies() -> dict[str, RemedySpec]:
    """Return every remedy by name, in alphabetical order."""
    _discover()
    return dict(sorted(_REMEDIES.items()))


def find(name: str) -> FaultSpec:
    """Return one fault.

    Raises:
        UsageError: If there is none of that name; the nearest names are in the message.
    """
    known = catalogue()
    if name not in known:
        raise unknown("fault", name, (n for n, spec in known.items() if not spec.control or n == "noop"))
    return known[name]


def find_remedy(name: str) -> RemedySpec:
    """Return one remedy.

    Raises:
        UsageError: If there is none of that name; the nearest names are in the message.
    """
    known = remedies()
    if name not in known:
        raise unknown("remedy", name, known)
    return known[name]


def find_entry(name: str) -> FaultSpec | RemedySpec:
    """Return one fault or remedy.

    Raises:
        UsageError: If there is neither; the nearest names are in the message.
    """
    return find_remedy(name) if name in remedies() else find(name)


def remedy_for(spec: FaultSpec) -> str | None:
    """Return the name of a fault's remedy: the one that it names, else the first one that names it."""
    return spec.remedy or next((r.name for r in remedies().values() if spec.name in r.for_), None)
