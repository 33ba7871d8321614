"""Puts one run together: policies, engine, stages, probes; what an injector and the loop are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from harness.rl import grpo
from harness.rl.backward import with_backward
from harness.rl.context import Context
from harness.rl.operators import operator_slots
from harness.rl.policy import Policy
from harness.rl.probes import Recorder
from harness.rl.rollout import Tape, TapeRecorder, free_stages
from harness.rl.stages import TAPED, Batch, Stage, StageFn, Stages
from harness.seams import OperatorSlot, Side
from harness.spec import RunSpec
from harness.trace import StepRecord


class TrainingEngine(Protocol):
    """The training side of a run."""

    owned: Mapping[Stage, str]

    def stages(self) -> dict[Stage, StageFn]:
        """Return the stages from ``scale`` to ``step``."""
        ...

    def effective(self) -> dict[str, Any]:
        """Return the settings that are in force, read back from the component."""
        ...


def make_engine(spec: RunSpec, trainer: Policy) -> TrainingEngine:
    """Return the training engine that a run asks for."""
    if spec.engine == "deepspeed":
        from harness.rl.engines.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(trainer, spec.rl, spec.deepspeed)
    from harness.rl.engines.torch_engine import TorchEngine

    return TorchEngine(trainer, spec.rl)


class Run:
    """One run, ready to go; a ``Host`` for an injector.

    Attributes:
        spec: What was asked for.
        stages: The table that faults swap entries of.
        owned: Stages that the engine does not open to faults, with the engine's name.
        taped: Stages that only hand on what the tape holds.
        probes: The measurements.
        claims: Place to the fault that has claimed it.
        recorder: The wrap around the stages.
    """

    def __init__(
        self, spec: RunSpec, folder: Path, emit: Callable[[StepRecord], None], tape: Path | None = None
    ) -> None:
        """Load the checkpoint and build the run.

        Args:
            spec: What to run.
            folder: Checkpoint folder.
            emit: Called with each step's record.
            tape: Tape to train on in ``replay`` mode.
        """
        from transformers import AutoTokenizer

        self.spec = spec
        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        trainer = Policy.load(folder, spec.rl.trainer)
        self._trainer, self._rollout = trainer, trainer.copy(spec.rl.rollout).freeze()
        self._reference = trainer.copy(spec.rl.trainer).freeze() if spec.rl.beta > 0 else None
        self.engine = make_engine(spec, trainer)
        self.owned = self.engine.owned
        rolling = free_stages() if tape is None else Tape(tape).stages()
        self.stages = Stages({**rolling, **grpo.stages(), **self.engine.stages()})
        self.recorder = Recorder(self.stages, trainer, emit)
        self.probes = self.recorder.probes
        self.taped = frozenset() if tape is None else TAPED
        self.claims: dict[str, str] = {}

    def modules(self, role: str, side: Side) -> list[tuple[str, Any]]:
        """Return ``(name, module)`` of every module of a role on a side; the reference runs on the trainer's side."""
        return [
            (f"{name}:{path}", module) for name, policy in self._policies(side) for path, module in policy.modules(role)
        ]

    def operator(self, kind: str, side: Side) -> list[OperatorSlot]:
        """Return the places where a side looks up an operator; none if it has no such operator."""
        return [slot for _, policy in self._policies(side) for slot in operator_slots(policy, kind)]

    with_backward = staticmethod(with_backward)

    def _policies(self, side: Side) -> list[tuple[str, Policy]]:
        trainer = [("trainer", self._trainer)]
        if self._reference is not None:
            trainer.append(("reference", self._reference))
        rollout = [("rollout", self._rollout)]
        return {"trainer": trainer, "rollout": rollout, "both": trainer + rollout}[side]

    def contexts(self) -> Iterator[Context]:
        """Yield the context of every step."""
        ops = grpo.clean_ops(self.spec.rl)
        for step in range(self.spec.steps):
            yield Context(
                step=step,
                seed=self.spec.seed,
                rl=self.spec.rl,
                task=self.spec.task,
                tokenizer=self._tokenizer,
                trainer=self._trainer,
                rollout=self._rollout,
                reference=self._reference,
                ops=ops,
            )

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        with self._trainer.whole():
            return sum(p.numel() for p in self._trainer.model.parameters())

    def record_tape(self) -> TapeRecorder:
        """Keep what the run samples and earns from now on."""
        tape, inner = TapeRecorder(), self.stages.advantage

        def keep(ctx: Context, batch: Batch) -> Batch:
            tape.keep(ctx.step, batch)
            kept: Batch = inner(ctx, batch)
            return kept

        self.stages.advantage = keep
        return tape
