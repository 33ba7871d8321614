"""The contract of a fault, or a remedy, as checks that anyone can run on an entry of their own.

``check_fault`` runs every check that applies and says in a sentence each what it found. The tests of the project run
the same function over the catalogue; ``harness faults check`` runs it on a name or a file.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.catalogue import Entry, FaultSpec, RemedySpec, catalogue, remedies
from harness.declared import DECLARED, NotMetError
from harness.errors import HarnessError, UsageError
from harness.inject import stages_of
from harness.plan import settings_of
from harness.seams import Probe, Schedule, Stage
from harness.snapshot import changes, snapshot
from harness.spec import Mode, RLSpec
from harness.testing import SMALL, Bench, make_checkpoint
from harness.trace import Trace, first_difference

STEPS, ONSET, LONG = 3, 1, 10  # an arm of three steps, healthy in the first; a longer one for what shows late


class NotTriedError(Exception):
    """A check cannot be made here; the message is its sentence."""


class Interrupted(BaseException):
    """Stands for Ctrl-C."""


@dataclass(frozen=True)
class Check:
    """Outcome of one check.

    Attributes:
        name: What was checked.
        outcome: ``pass``, ``fail``, or ``skip`` where it could not be made.
        sentence: What was found.
    """

    name: str
    outcome: Literal["pass", "fail", "skip"]
    sentence: str


class Workplace:
    """Two tiny checkpoints with different numbers of experts, one tape, and their clean traces.

    Attributes:
        bench: The one on which a fault is tried.
    """

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(1)  # as every arm runs
        self._folder = folder
        self._clean: dict[tuple[Mode, int, bool, RLSpec], Trace] = {}
        self.bench = Bench(make_checkpoint(folder / "original", kv_heads=2), folder / "tape.safetensors")
        self.bench.run("free", record=self.bench.tape, steps=LONG)

    @functools.cached_property
    def other(self) -> Bench:
        """The one with half as many experts."""
        return Bench(make_checkpoint(self._folder / "proxy", experts=4, kv_heads=2, seed=1), self.bench.tape)

    def clean(self, spec: Entry, steps: int = STEPS, *, other: bool = False) -> Trace:
        """Return the clean twin of an entry's arms, run once."""
        rl = settings_of(SMALL, spec)
        key = (spec.mode, steps, other, rl)
        if key not in self._clean:
            bench = self.other if other else self.bench
            self._clean[key] = bench.run(spec.mode, steps=steps, rl=rl)[0]
        return self._clean[key]


class Trial:
    """One entry on a workplace; what several checks look at is run once.

    Attributes:
        spec: The entry.
        place: Where it is tried.
    """

    def __init__(self, spec: Entry, place: Workplace) -> None:
        self.spec, self.place = spec, place

    @functools.cached_property
    def awake(self) -> tuple[Trace, int, list[str]]:
        """A run with the fault awake from ``ONSET``: its trace, the steps in which it fired, what it left changed."""
        return self._watched(None)

    def left_by(self, error: type[BaseException]) -> list[str]:
        """Run it again, with an error in the last step, and return what was left changed."""
        return self._watched(error)[2]

    def _watched(self, error: type[BaseException] | None) -> tuple[Trace, int, list[str]]:
        seen: dict[str, Any] = {}
        breaking = Stage.PROMPTS if Stage.SYNC in stages_of(self.spec.seam) else Stage.SYNC

        def inspect(run: Any) -> None:
            inner = run.stages[breaking]

            def last_words(ctx: Any, *values: Any) -> Any:
                if error is not None and ctx.step == STEPS - 1:
                    raise error("on purpose")
                return inner(ctx, *values)

            run.stages[breaking] = last_words
            seen.update(run=run, before=snapshot(run))

        ref = self.spec.ref(schedule=Schedule(ONSET))
        try:
            trace, fired = self.place.bench.run(self.spec.mode, ref, steps=STEPS, inspect=inspect)
        except (RuntimeError, Interrupted) as e:
            if error is None or str(e) != "on purpose":
                raise
            trace, fired = Trace(), 0
        return trace, fired, changes(seen["before"], snapshot(seen["run"]))


def asleep(trial: Trial) -> str:
    """Asleep, the run is bit-identical to a clean one."""
    mode = trial.spec.mode
    trace, fired = trial.place.bench.run(mode, trial.spec.ref(schedule=Schedule(99)), steps=STEPS)
    if fired:
        raise NotMetError(f"it ran in {fired} steps although it was asleep")
    if found := first_difference(trace, trial.place.clean(trial.spec)):
        raise NotMetError(f"asleep, {found[1]} at step {found[0]} is not the clean run's")
    return "bit-identical to the clean run"


def fires(trial: Trial) -> str:
    """It runs in every step from its onset on, and not before."""
    trace, fired, _ = trial.awake
    if found := first_difference(trace.window(0, ONSET), trial.place.clean(trial.spec).window(0, ONSET)):
        raise NotMetError(f"{found[1]} at step {found[0]} differs before the onset at step {ONSET}")
    if fired != STEPS - ONSET:
        raise NotMetError(f"it ran in {fired} of {STEPS - ONSET} steps in which it was awake")
    return f"runs from its onset on, {fired} steps of {STEPS}"


def deterministic(trial: Trial) -> str:
    """Two runs give the same trace."""
    mode, ref = trial.spec.mode, trial.spec.ref(schedule=Schedule(ONSET))
    again, _ = trial.place.bench.run(mode, ref, steps=STEPS)
    if found := first_difference(trial.awake[0], again):
        raise NotMetError(
            f"two runs differ in {found[1]} at step {found[0]}; draw random numbers from ctx.rng(name) only"
        )
    return "two runs are bit-identical"


def acts(trial: Trial) -> str:
    """Awake, the trace is another one."""
    spec, place = trial.spec, trial.place
    if spec.control or isinstance(spec, RemedySpec):
        raise NotTriedError("a healthy run may stay as it is")
    if getattr(spec, "threshold", False):
        raise NotTriedError(
            f"acts above a threshold of {getattr(spec, 'severity', None)}, which a tiny model need not reach"
        )
    if found := first_difference(trial.awake[0], place.clean(spec)):
        return f"{found[1]} differs at step {found[0]}"
    trace, _ = place.bench.run(spec.mode, spec.ref(schedule=Schedule(ONSET)), steps=LONG)
    if found := first_difference(trace, place.clean(spec, LONG)):
        return f"{found[1]} differs at step {found[0]}"
    raise NotMetError(f"it runs, but the trace of {LONG} steps is the clean run's")


def measurement_only(trial: Trial) -> str:
    """A fault on a probe changes that number and nothing else."""
    assert isinstance(trial.spec.seam, Probe)
    trace, clean = trial.awake[0], trial.place.clean(trial.spec)
    metrics = sorted({m for record in (*trace, *clean) for m in record.metrics} - {trial.spec.seam.name})
    for metric in metrics:
        if not _same(trace.column(metric), clean.column(metric)):
            raise NotMetError(
                f"{metric} changes as well, although only the measurement {trial.spec.seam.name} is to lie"
            )
    return f"only {trial.spec.seam.name} changes"


def _same(a: list[float | None], b: list[float | None]) -> bool:
    return list(map(repr, a)) == list(map(repr, b))


def undone(trial: Trial) -> str:
    """Everything is as it was when the run has ended, raised or been interrupted."""
    for how, left in {
        "ended": trial.awake[2],
        "raised": trial.left_by(RuntimeError),
        "been interrupted": trial.left_by(Interrupted),
    }.items():
        if left:
            raise NotMetError(f"when the run has {how}, not as before: {', '.join(left[:5])}")
    return "all is as before when the run ends, raises or is interrupted"


def other_experts(trial: Trial) -> str:
    """It works on a model with another number of experts."""
    mode, ref = trial.spec.mode, trial.spec.ref(schedule=Schedule(ONSET))
    trace, fired = trial.place.other.run(mode, ref, steps=STEPS)
    if fired != STEPS - ONSET:
        raise NotMetError(f"on a model with 4 experts it ran in {fired} of {STEPS - ONSET} steps")
    if first_difference(trace.window(0, ONSET), trial.place.clean(trial.spec, other=True).window(0, ONSET)):
        raise NotMetError("on a model with 4 experts the trace differs before the onset")
    return "runs on a model with 8 experts and on one with 4"


RUNNING: Mapping[str, Callable[[Trial], str]] = {
    "asleep": asleep,
    "fires": fires,
    "deterministic": deterministic,
    "acts": acts,
    "measurement only": measurement_only,
    "undone": undone,
    "other experts": other_experts,
}


def applies(name: str, spec: Entry) -> bool:
    """Say whether a check is one for an entry of this kind."""
    if name == "claims":
        return isinstance(spec, FaultSpec)
    if name == "configuration":
        return spec.config
    if name == "measurement only":
        return isinstance(spec.seam, Probe)
    return name in DECLARED or not spec.config


def check_fault(spec: Entry, place: Workplace | None = None) -> list[Check]:
    """Run the contract on a fault or a remedy.

    Args:
        spec: The entry; it must be one that ``harness.catalogue`` knows, or that ``load_file`` has loaded.
        place: Where to try it; None makes one for this call (about three seconds).

    Returns:
        The outcome of every check that applies, in a fixed order.
    """
    with ExitStack() as stack:
        if place is None and not spec.config:
            place = Workplace(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        checks = [_outcome(name, check, spec) for name, check in DECLARED.items() if applies(name, spec)]
        if place is not None:
            trial = Trial(spec, place)
            running = {name: check for name, check in RUNNING.items() if applies(name, spec)}
            checks += [_outcome(name, check, trial) for name, check in running.items()]
    return checks


def _outcome(name: str, check: Callable[[Any], str], subject: Any) -> Check:
    spec = subject.spec if isinstance(subject, Trial) else subject
    if isinstance(subject, Trial) and spec.engine not in (None, "torch"):
        return Check(name, "skip", f"needs the {spec.engine} engine, which is not started here")
    if isinstance(subject, Trial) and "correction_bias" in spec.needs:
        return Check(name, "skip", "needs a router with a correction bias, which the model tried here does not have")
    try:
        return Check(name, "pass", check(subject))
    except NotMetError as e:
        return Check(name, "fail", str(e))
    except NotTriedError as e:
        return Check(name, "skip", str(e))
    except HarnessError as e:
        return Check(name, "fail", f"refused: {e}")
    except Exception as e:  # what anyone's code may raise
        frame = traceback.extract_tb(e.__traceback__)[-1]
        return Check(name, "fail", f"raises {type(e).__name__} at {Path(frame.filename).name}:{frame.lineno}: {e}")


def load_file(path: Path) -> list[Entry]:
    """Return the faults and remedies that a file defines; it may, but need not, belong to the catalogue.

    Raises:
        UsageError: If the file cannot be read or imported, or defines none.
    """
    where = path.resolve()
    if not where.is_file():
        raise UsageError(f"{path} is not a file")

    def found() -> list[Entry]:
        every: list[Entry] = [*catalogue().values(), *remedies().values()]
        return [e for e in every if Path(e.source).resolve() == where]

    if entries := found():
        return entries
    name = f"{where.parent.name}.{where.stem}"
    module_spec = importlib.util.spec_from_file_location(name, where)
    if module_spec is None or module_spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as e:  # what anyone's code may raise
        del sys.modules[name]
        raise UsageError(f"{path} cannot be imported: {type(e).__name__}: {e}") from e
    if not (entries := found()):
        raise UsageError(f"{path} defines no fault; decorate a function with @fault of harness.catalogue")
    return entries
