"""The one list of places where a fault may attach, and the small values that say which fault, where and when.

``Stage.X``, or a tuple of stages
    Wraps stages of the step (``harness.rl.stages``). ``faulty(ctx, *values)`` may call ``clean(ctx, *values)``.
``Module(role, side, direction)``
    Wraps the forward of every module of a role. ``faulty(ctx, module, *args)`` may call ``clean(module, *args)``.
``Operator(kind, side, direction)``
    Swaps an implementation that a model calls. ``attention``, ``experts`` (through the library's registries) and
    ``norm``: ``faulty(ctx, module, *args)``, ``clean(module, *args)``. ``rotary``, ``softmax``, ``grouped_mm``
    (functions of the modeling module or of torch) and the fused Ascend operators (``npu_...``, by the names and
    signatures of torch_npu; every arm of such a fault runs on ``harness.rl.npu_ops``): ``faulty(ctx, *args)``,
    ``clean(*args)``.
``direction="backward"`` of a Module or Operator
    Leaves the values as they are and rewrites the gradients. ``faulty(ctx, call, *grads)`` gets the call's arguments
    and the gradients of its outputs, and may call ``clean(call, *grads)``; both return ``Gradients(inputs, weights)``.
``Probe(name)``
    Wraps a measurement: the number lies, the weights do not. ``faulty(ctx, seen)`` may call ``clean(seen)``.
``Config(section, key)``
    Rewrites a section of the run's own configuration before it starts. ``faulty(config)`` returns the new one.

Only the standard library is needed to import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from harness.rl.stages import Stage, Stages

__all__ = [
    "FUSED",
    "Config",
    "FaultRef",
    "Gradients",
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
Direction = Literal["forward", "backward"]
ROLES = ("router", "experts", "norm", "attention", "rotary", "head", "embedding")
FUSED = (
    "npu_rms_norm",
    "npu_add_rms_norm",
    "npu_swiglu",
    "npu_rotary_mul",
    "npu_fusion_attention",
    "npu_grouped_matmul",
    "npu_moe_token_permute",
    "npu_moe_token_unpermute",
    "npu_moe_gating_top_k_softmax",
    "npu_moe_gating_top_k",
)
OPERATORS = ("attention", "experts", "norm", "rotary", "softmax", "grouped_mm", *FUSED)
SECTIONS = ("rl", "deepspeed")


@dataclass(frozen=True)
class Module:
    """Every module of a role: ``router, experts, norm, attention, rotary, head, embedding``."""

    role: str
    side: Side = "both"
    direction: Direction = "forward"

    def __post_init__(self) -> None:
        _one_of("module role", self.role, ROLES)
        _one_of("side", self.side, ("trainer", "rollout", "both"))
        _one_of("direction", self.direction, ("forward", "backward"))


@dataclass(frozen=True)
class Operator:
    """The implementation of one operator, wherever a model looks it up; ``OPERATORS`` lists the kinds."""

    kind: str
    side: Side = "both"
    direction: Direction = "forward"

    def __post_init__(self) -> None:
        _one_of("operator", self.kind, OPERATORS)
        _one_of("side", self.side, ("trainer", "rollout", "both"))
        _one_of("direction", self.direction, ("forward", "backward"))

    @property
    def fused(self) -> bool:
        """True for an operator that only a model on the fused Ascend operators calls."""
        return self.kind in FUSED


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
        return f"module {seam.role} ({_where(seam)})"
    if isinstance(seam, Operator):
        return f"operator {seam.kind} ({_where(seam)})"
    if isinstance(seam, Probe):
        return f"probe {seam.name}"
    return f"config {seam.section}.{seam.key}"


def _where(seam: Module | Operator) -> str:
    return seam.side if seam.direction == "forward" else f"{seam.side}, {seam.direction}"


def places(seam: Seam) -> tuple[str, ...]:
    """Return the places that a seam claims: two faults awake in one run may not share any."""
    if isinstance(seam, Stage):
        return (f"stage {seam.value}",)
    if isinstance(seam, tuple):
        return tuple(f"stage {s.value}" for s in seam)
    if isinstance(seam, (Module, Operator)):
        what = f"module {seam.role}" if isinstance(seam, Module) else f"operator {seam.kind}"
        sides = ("trainer", "rollout") if seam.side == "both" else (seam.side,)
        return tuple(f"{what} ({side}, {seam.direction})" for side in sides)
    return (describe_seam(seam),)


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


class Gradients(NamedTuple):
    """What a backward pass gives.

    Attributes:
        inputs: One gradient, or None, for every floating-point tensor among the arguments, in order.
        weights: One gradient, or None, by name of every trainable parameter of its module that the call used.
    """

    inputs: tuple[Any, ...]
    weights: dict[str, Any]


class Call(Protocol):
    """One forward call whose gradients a backward fault rewrites.

    Attributes:
        module: The module that was called, or None for a plain function.
        args: Positional arguments, without the module.
        kwargs: Keyword arguments.
    """

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def backward(self, *grads: Any) -> Gradients:
        """Return the correct gradients, given those of the differentiable outputs."""
        ...


@runtime_checkable
class Host(Protocol):
    """What a run offers to an injector; the run's own engine implements it, and so may a foreign trainer.

    Attributes:
        stages: The table of stages.
        owned: Stages that an engine keeps to itself, with the engine's name.
        taped: Stages that only hand on what a tape holds.
        probes: The measurements.
        claims: Place to the fault that has claimed it.
    """

    stages: Stages
    owned: Mapping[Stage, str]
    taped: frozenset[Stage]
    probes: dict[str, Callable[..., Any]]
    claims: dict[str, str]

    def modules(self, role: str, side: Side) -> list[tuple[str, Any]]:
        """Return ``(name, module)`` of every module of a role on a side."""
        ...

    def operator(self, kind: str, side: Side) -> list[OperatorSlot]:
        """Return the places where a side looks up an operator; none if it has no such operator."""
        ...

    def with_backward(self, forward: Callable[..., Any], rewrite: Callable[..., Gradients]) -> Callable[..., Any]:
        """Return a callable with the values of ``forward`` and the gradients of ``rewrite(call, *grads)``."""
        ...


class OperatorSlot(Protocol):
    """One place where a model looks up an implementation."""

    def current(self) -> Callable[..., Any]:
        """Return the implementation in force."""
        ...

    def replace(self, function: Callable[..., Any]) -> Callable[[], None]:
        """Put another implementation in force and return what undoes it."""
        ...
