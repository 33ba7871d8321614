"""Which arms an experiment needs, and what each of them is to the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.catalogue import FaultSpec, find
from harness.pairs import Prepared
from harness.seams import FaultRef, Schedule
from harness.spec import Condition, Engine, Mode, PairSpec, RunSpec
from harness.store import Store, code_digest

NULL = {"replay": "null_weights_nudged", "free": "null_sampling_changed"}


@dataclass(frozen=True)
class Request:
    """What is to be found out: does this pair's proxy reproduce this fault?

    Attributes:
        pair: The pair, with steps and onset as they are to be used.
        fault: The fault with its options and schedule.
        mode: ``replay`` or ``free``.
        engine: Training engine.
        seeds: Seeds of the arms.
    """

    pair: PairSpec
    fault: FaultRef
    mode: Mode
    engine: Engine
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class ArmJob:
    """Everything a worker needs to run one arm; picklable.

    Attributes:
        key: Content address of the run.
        spec: What to run.
        folder: Checkpoint folder.
        store: Root of the store.
        tape: Key of the run whose tape is replayed, or None.
        record: Keep a tape of this run.
        environment: Environment variables to set first; only for a fresh process.
    """

    key: str
    spec: RunSpec
    folder: str
    store: str
    tape: str | None = None
    record: bool = False
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Arm:
    """One planned run.

    Attributes:
        model: ``original`` or ``proxy``.
        condition: What it is in the experiment.
        seed: Its seed.
        job: What a worker needs.
    """

    model: str
    condition: Condition
    seed: int
    job: ArmJob

    @property
    def label(self) -> str:
        """For example ``original/clean seed 0``."""
        return f"{self.model}/{self.condition} seed {self.seed}"


class Planner:
    """Turns conditions into runs with content addresses."""

    def __init__(self, request: Request, models: dict[str, Prepared], store: Store) -> None:
        self._request, self._models, self._store = request, models, store
        self._code: dict[str | None, str] = {}

    def _code_of(self, fault: FaultSpec | None) -> str:
        name = None if fault is None else fault.name
        if name not in self._code:
            self._code[name] = code_digest(() if fault is None else fault_sources(fault))
        return self._code[name]

    def arm(
        self,
        model: str,
        condition: Condition,
        seed: int,
        fault: FaultRef | None = None,
        steps: int | None = None,
    ) -> Arm:
        """Plan one run of one model.

        Args:
            model: ``original`` or ``proxy``.
            condition: What it is in the experiment; ``tape`` is the clean run in free mode that others replay.
            seed: Its seed.
            fault: What is installed in it.
            steps: Number of steps, where it is not the pair's.
        """
        request = self._request
        mode: Mode = "free" if condition == "tape" else request.mode
        tape = self.arm(model, "tape", seed) if mode == "replay" else None
        deepspeed = request.engine == "deepspeed" and condition != "tape"
        spec = RunSpec(
            weights=self._models[model].digest,
            task=request.pair.task,
            rl=request.pair.rl,
            engine="deepspeed" if deepspeed else "torch",
            deepspeed=request.pair.deepspeed if deepspeed else {},
            mode=mode,
            tape=None if tape is None else tape.job.key,
            steps=request.pair.steps if steps is None else steps,
            seed=seed,
            fault=None if fault is None else fault.to_dict(),
        )
        job = ArmJob(
            key=spec.key(self._code_of(None if fault is None else find(fault.name))),
            spec=spec,
            folder=str(self._models[model].folder),
            store=str(self._store.root),
            tape=spec.tape,
            record=mode == "free" and fault is None,
        )
        return Arm(model, condition, seed, job)


def fault_sources(fault: FaultSpec) -> tuple[Path, ...]:
    """Return the files that define a fault."""
    code: Any = fault.factory.__code__
    return (Path(code.co_filename),)


def plan(request: Request, planner: Planner) -> list[Arm]:
    """Return the arms of an experiment: {original, proxy} x {tape, clean, null, faulted} x seeds.

    A configuration fault acts from the first step, so nothing can be compared before its onset; a second clean run,
    ``twin``, shows instead that clean runs are bit-identical.
    """
    fault = find(request.fault.name)
    onset = request.fault.schedule.onset
    null = find(NULL[request.mode]).ref(schedule=Schedule(onset, until=onset + 1 if request.mode == "replay" else None))
    never = find("noop").ref(schedule=Schedule(request.pair.steps))
    arms = []
    for model in ("original", "proxy"):
        for seed in request.seeds:
            if request.mode == "replay":
                arms.append(planner.arm(model, "tape", seed))
            arms.append(planner.arm(model, "clean", seed))
            arms.append(planner.arm(model, "null", seed, null))
            arms.append(planner.arm(model, "faulted", seed, request.fault))
            if fault.config:
                arms.append(planner.arm(model, "twin", seed, never))
    return arms


def severity_probe(request: Request, planner: Planner, model: str, severity: float) -> Arm:
    """Return a short run of a threshold fault at another severity: the first seed only, two steps past onset."""
    fault = find(request.fault.name)
    assert fault.severity is not None
    ref = fault.ref({**dict(request.fault.options), fault.severity: severity}, request.fault.schedule)
    steps = min(request.fault.schedule.onset + 2, request.pair.steps)
    return planner.arm(model, "faulted", request.seeds[0], ref, steps)
