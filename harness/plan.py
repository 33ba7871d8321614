"""Which arms an experiment needs, and what each of them is to the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from harness.catalogue import Entry, find, find_remedy
from harness.pairs import Prepared
from harness.seams import FaultRef, Operator, Schedule
from harness.spec import Condition, Engine, Mode, PairSpec, RLSpec, RunSpec
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
        remedy: A remedy that is tried in further arms, awake when the fault is; None for none.
    """

    pair: PairSpec
    fault: FaultRef
    mode: Mode
    engine: Engine
    seeds: tuple[int, ...]
    remedy: FaultRef | None = None


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
        self._code: dict[tuple[str, ...], str] = {}

    def _code_of(self, *entries: Entry) -> str:
        names = tuple(e.name for e in entries)
        if names not in self._code:
            self._code[names] = code_digest(path for e in entries for path in fault_sources(e))
        return self._code[names]

    def arm(
        self,
        model: str,
        condition: Condition,
        seed: int,
        fault: FaultRef | None = None,
        steps: int | None = None,
        remedy: FaultRef | None = None,
    ) -> Arm:
        """Plan one run of one model.

        Args:
            model: ``original`` or ``proxy``.
            condition: What it is in the experiment; ``tape`` is the clean run in free mode that others replay.
            seed: Its seed.
            fault: What is installed in it.
            steps: Number of steps, where it is not the pair's.
            remedy: What is installed around the fault.
        """
        request = self._request
        mode: Mode = "free" if condition == "tape" else request.mode
        tape = self.arm(model, "tape", seed) if mode == "replay" else None
        deepspeed = request.engine == "deepspeed" and condition != "tape"
        spec = RunSpec(
            weights=self._models[model].digest,
            task=request.pair.task,
            rl=request.pair.rl if condition == "tape" else settings_of(request.pair.rl, find(request.fault.name)),
            engine="deepspeed" if deepspeed else "torch",
            deepspeed=request.pair.deepspeed if deepspeed else {},
            mode=mode,
            tape=None if tape is None else tape.job.key,
            steps=request.pair.steps if steps is None else steps,
            seed=seed,
            fault=None if fault is None else fault.to_dict(),
            remedy=None if remedy is None else remedy.to_dict(),
        )
        installed: list[Entry] = [] if fault is None else [find(fault.name)]
        if remedy is not None:
            installed.append(find_remedy(remedy.name))
        job = ArmJob(
            key=spec.key(self._code_of(*installed)),
            spec=spec,
            folder=str(self._models[model].folder),
            store=str(self._store.root),
            tape=spec.tape,
            record=mode == "free" and fault is None,
        )
        return Arm(model, condition, seed, job)


def settings_of(rl: RLSpec, fault: Entry) -> RLSpec:
    """Return the RL settings of every arm of a fault: one of a fused operator runs its side on fused operators."""
    seam = fault.seam
    if not (isinstance(seam, Operator) and seam.fused):
        return rl
    sides = {"trainer": rl.trainer, "rollout": rl.rollout}
    library = [name for name, side in sides.items() if seam.side in (name, "both") and side.ops == "library"]
    return rl.model_copy(update={name: sides[name].model_copy(update={"ops": "reference"}) for name in library})


def fault_sources(entry: Entry) -> tuple[Path, ...]:
    """Return the files that define a fault or a remedy."""
    return (Path(entry.source),)


def plan(request: Request, planner: Planner) -> list[Arm]:
    """Return the arms of an experiment: {original, proxy} x {tape, clean, null, faulted} x seeds.

    A configuration fault acts from the first step, so nothing can be compared before its onset; a second clean run,
    ``twin``, shows instead that clean runs are bit-identical. With a remedy there is a ``remedied`` arm for every
    faulted one.
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
            if request.remedy is not None:
                arms.append(planner.arm(model, "remedied", seed, request.fault, remedy=request.remedy))
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
