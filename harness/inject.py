"""Installs a fault at its seam, wakes it on schedule, counts that it ran, and undoes it on every exit path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError
from harness.seams import Call, Config, Gradients, Host, Module, Operator, Probe, Schedule, Stage, describe_seam, places

if TYPE_CHECKING:
    from harness.catalogue import Entry, FaultSpec
    from harness.seams import FaultRef

Undo = Callable[[], None]


class Injection(AbstractContextManager["Injection"]):
    """One fault in one run. Use as a context manager around the loop.

    While the fault sleeps nothing of it is in the run: no wrapper, no hook, no flag that is tested.

    Attributes:
        fired: Number of steps in which the faulty callable ran at least once.
    """

    def __init__(self, spec: Entry, ref: FaultRef, host: Host) -> None:
        """Check that the fault, or the remedy, can be installed.

        Raises:
            UsageError: If its seam is owned by the engine or the tape, matches nothing, or is a configuration seam.
        """
        self.fired = 0
        self._spec = spec
        self._options = dict(ref.options)
        self._schedule: Schedule = ref.schedule
        self._host = host
        self._undo: list[Undo] = []
        self._ran = False
        self._ctx: Any = None
        self._check()

    def _check(self) -> None:
        seam = self._spec.seam
        where = describe_seam(seam)
        if isinstance(seam, Config):
            raise UsageError(f"fault {self._spec.name} rewrites the configuration ({where}); it cannot be woken later")
        if isinstance(seam, Module) and not self._host.modules(seam.role, seam.side):
            raise UsageError(f"fault {self._spec.name}: the model has no {seam.role} module on side {seam.side}")
        if isinstance(seam, Operator) and not self._host.operator(seam.kind, seam.side):
            raise UsageError(f"fault {self._spec.name}: {_no_operator(seam)}")
        if isinstance(seam, Probe) and seam.name not in self._host.probes:
            raise UsageError(
                f"fault {self._spec.name}: no probe {seam.name!r}; known: {', '.join(sorted(self._host.probes))}"
            )
        for stage in stages_of(seam):
            if stage in self._host.owned:
                raise UsageError(
                    f"fault {self._spec.name} needs stage {stage.value}, which engine "
                    f"{self._host.owned[stage]} owns; use --engine torch or a configuration fault"
                )
        stages = stages_of(seam)
        if stages and self._host.taped.issuperset(stages) and not self._spec.control:
            raise UsageError(
                f"fault {self._spec.name} acts on {where}, but this run replays a tape and only hands on what the "
                "tape holds; use --mode free"
            )

    def __enter__(self) -> Injection:
        """Claim the seam; a remedy claims nothing, since it is installed around a fault.

        Raises:
            UsageError: If another fault has claimed a part of it.
        """
        if self._spec.kind != "fault":
            return self
        for place in places(self._spec.seam):
            other = self._host.claims.get(place)
            if other is not None:
                raise UsageError(f"faults {other} and {self._spec.name} both claim {place}; install one of them")
        self._host.claims.update(dict.fromkeys(places(self._spec.seam), self._spec.name))
        return self

    def steps(self, contexts: Iterable[Any]) -> Iterator[Any]:
        """Pass contexts through to the loop, waking and putting to sleep between two of them."""
        yield from steps_of([self], contexts)

    def _wake(self) -> None:
        seam = self._spec.seam
        try:
            if isinstance(seam, Module):
                for _, module in self._host.modules(seam.role, seam.side):
                    self._undo.append(self._swap_forward(module, seam.direction))
            elif isinstance(seam, Operator):
                for slot in self._host.operator(seam.kind, seam.side):
                    self._undo.append(slot.replace(self._bind(slot.current(), seam.direction)))
            elif isinstance(seam, Probe):
                self._undo.append(self._swap_probe(seam.name))
            else:
                for stage in stages_of(seam):
                    self._undo.append(self._swap_stage(stage))
        except BaseException:
            self._sleep()
            raise

    def _sleep(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _faulty(self, clean: Callable[..., Any]) -> Callable[..., Any]:
        return self._spec.factory(clean, **self._options)

    def _swap_stage(self, stage: Stage) -> Undo:
        stages = self._host.stages
        clean = stages[stage]
        faulty = self._faulty(clean)

        def counted(*args: Any) -> Any:
            self._ran = True
            return faulty(*args)

        stages[stage] = counted

        def undo() -> None:
            stages[stage] = clean

        return undo

    def _bind(self, clean: Callable[..., Any], direction: str = "forward") -> Callable[..., Any]:
        """Give the faulty callable, or the faulty gradient, the context of the current step as its first argument."""
        faulty = self._faulty(clean if direction == "forward" else _clean_backward)

        def bound(*args: Any, **kwargs: Any) -> Any:
            self._ran = True
            return faulty(self._ctx, *args, **kwargs)

        return bound if direction == "forward" else self._host.with_backward(clean, bound)

    def _swap_forward(self, module: Any, direction: str) -> Undo:
        if "forward" in vars(module):
            raise UsageError(f"fault {self._spec.name}: the forward of {type(module).__name__} is already replaced")
        bound = self._bind(type(module).forward, direction)
        module.forward = lambda *args, **kwargs: bound(module, *args, **kwargs)
        return lambda: delattr(module, "forward")

    def _swap_probe(self, name: str) -> Undo:
        probes = self._host.probes
        clean = probes[name]
        probes[name] = self._bind(clean)

        def undo() -> None:
            probes[name] = clean

        return undo

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sleep()
        for place in places(self._spec.seam) if self._spec.kind == "fault" else ():
            self._host.claims.pop(place, None)


def _clean_backward(call: Call, *grads: Any) -> Gradients:
    return call.backward(*grads)


def _no_operator(seam: Operator) -> str:
    if seam.fused:
        return (
            f"no model on side {seam.side} runs on the fused operator {seam.kind}; choose ops: reference or fused, and "
            "a family that uses it"
        )
    return f"the model has no {seam.kind} operator on side {seam.side}"


def steps_of(injections: Sequence[Injection], contexts: Iterable[Any]) -> Iterator[Any]:
    """Pass contexts through to the loop; injections on one place wake in order and fall asleep in reverse.

    Args:
        injections: What is installed, the outermost last. Injections on one place need one schedule.
        contexts: One context per step.
    """
    for ctx in contexts:
        for injection in reversed(injections):
            if injection._undo and not injection._schedule.awake(ctx.step):
                injection._sleep()
        for injection in injections:
            if not injection._undo and injection._schedule.awake(ctx.step):
                injection._wake()
            injection._ctx, injection._ran = ctx, False
        yield ctx
        for injection in injections:
            injection.fired += injection._ran


def stages_of(seam: Any) -> tuple[Stage, ...]:
    """Return the stages that a seam claims; none for other kinds of seam."""
    if isinstance(seam, Stage):
        return (seam,)
    return seam if isinstance(seam, tuple) else ()


def rewrite_config(spec: FaultSpec, ref: FaultRef, config: dict[str, Any]) -> dict[str, Any]:
    """Apply a configuration fault to its section.

    Args:
        spec: A fault whose seam is ``Config``.
        ref: Its options.
        config: The section as plain data; not changed.

    Returns:
        The rewritten section.
    """
    new: dict[str, Any] = spec.factory(None, **dict(ref.options))(config)
    return new
