"""The one list of places where a fault may attach, and the small values that say which fault, where and when.

``Stage.X``, or a tuple of stages
    Wraps stages of the step (``harness.rl.stages``). ``faulty(ctx, *values)`` may call ``clean(ctx, *values)``.
``Module(role, side)``
    Wraps the forward of every module of a role. ``faulty(ctx, module, *args)`` may call ``clean(module, *args)``.
``Operator(kind, side)``
    Swaps an implementation in the library's registry. ``faulty(ctx, module, *args)``, ``clean(module, *args)``.
``Probe(name)``
    Wraps a measurement: the number lies, the weights do not. ``faulty(ctx, seen)`` may call ``clean(seen)``.
``Config(section, key)``
    Rewrites a section of the run's own configuration before it starts. ``faulty(config)`` returns the new one.

Only the standard library is needed to import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from harness.rl.stages import Stage, Stages

__all__ = [
    "Config",
    "FaultRef",
    "Host",
    "Module",
    "Operator",
    "Probe",
    "Schedule",
    "Seam",
    "Side",
    "Stage",
    "describe_seam",
]

Side = Literal["trainer", "rollout", "both"]
ROLES = ("router", "experts", "norm", "attention", "rotary", "head", "embedding")
OPERATORS = ("attention", "experts")
SECTIONS = ("rl", "deepspeed")


@dataclass(frozen=True)
class Module:
    """Every module of a role: ``router, experts, norm, attention, rotary, head, embedding``."""

    role: str
    side: Side = "both"

    def __post_init__(self) -> None:
        _one_of("module role", self.role, ROLES)
        _one_of("side", self.side, ("trainer", "rollout", "both"))


@dataclass(frozen=True)
class Operator:
    """The implementation that a model looks up in its library's registry: ``attention`` or ``experts``."""

    kind: str
    side: Side = "both"

    def __post_init__(self) -> None:
        _one_of("operator", self.kind, OPERATORS)
        _one_of("side", self.side, ("trainer", "rollout", "both"))


@dataclass(frozen=True)
class Probe:
    """One measurement of ``harness.rl.probes``, by its name."""

    name: str


@dataclass(frozen=True)
class Config:
    """A section of the run's configuration: ``rl`` (the RL settings) or ``deepspeed`` (the engine's JSON).

    Attributes:
        section: The section that is rewritten.
        key: The setting whose effective value, read back from the component, proves that the fault fired.
    """

    section: str
    key: str

    def __post_init__(self) -> None:
        _one_of("configuration section", self.section, SECTIONS)


Seam = Stage | tuple[Stage, ...] | Module | Operator | Probe | Config


def _one_of(kind: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{kind} {value!r} does not exist; known: {', '.join(allowed)}")


def describe_seam(seam: Seam) -> str:
    """Say in a few words where a seam is, for example ``stage clip`` or ``module router (both)``."""
    if isinstance(seam, Stage):
        return f"stage {seam.value}"
    if isinstance(seam, tuple):
        return "stages " + ", ".join(s.value for s in seam)
    if isinstance(seam, Module):
        return f"module {seam.role} ({seam.side})"
    if isinstance(seam, Operator):
        return f"operator {seam.kind} ({seam.side})"
    if isinstance(seam, Probe):
        return f"probe {seam.name}"
    return f"config {seam.section}.{seam.key}"


@dataclass(frozen=True)
class Schedule:
    """When a fault is awake: steps ``onset``, ``onset + every``, ... before ``until``.

    Attributes:
        onset: First step at which the fault is awake.
        until: First step at which it sleeps again; None for never.
        every: Distance between two steps at which it is awake.
    """

    onset: int = 0
    until: int | None = None
    every: int = 1

    def __post_init__(self) -> None:
        if self.onset < 0 or self.every < 1:
            raise ValueError(f"schedule needs onset >= 0 and every >= 1, got {self.onset} and {self.every}")

    def awake(self, step: int) -> bool:
        """Say whether the fault is awake at a step."""
        inside = step >= self.onset and (self.until is None or step < self.until)
        return inside and (step - self.onset) % self.every == 0


@dataclass(frozen=True)
class FaultRef:
    """A fault by name, with its options and its schedule: plain, hashable, picklable data.

    Attributes:
        name: Name in the catalogue.
        options: Sorted ``(name, value)`` pairs; values are bool, int, float or str.
        schedule: When it is awake.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    schedule: Schedule = field(default_factory=Schedule)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        s = self.schedule
        return {
            "name": self.name,
            "options": dict(self.options),
            "schedule": {"onset": s.onset, "until": s.until, "every": s.every},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FaultRef:
        """Rebuild from ``to_dict``'s result."""
        options = tuple(sorted(dict(data.get("options", {})).items()))
        return cls(data["name"], options, Schedule(**data.get("schedule", {})))


@runtime_checkable
class Host(Protocol):
    """What a run offers to an injector; the run's own engine implements it, and so may a foreign trainer."""

    stages: Stages
    owned: Mapping[Stage, str]
    probes: dict[str, Callable[..., Any]]

    def modules(self, role: str, side: Side) -> list[tuple[str, Any]]:
        """Return ``(name, module)`` of every module of a role on a side."""
        ...

    def operator(self, kind: str, side: Side) -> list[OperatorSlot]:
        """Return the places where a side looks up an operator."""
        ...


class OperatorSlot(Protocol):
    """One model's choice of an implementation for one operator."""

    def current(self) -> Callable[..., Any]:
        """Return the implementation in force, as ``f(module, *args)``."""
        ...

    def replace(self, function: Callable[..., Any]) -> Callable[[], None]:
        """Put another implementation in force and return what undoes it."""
        ...
