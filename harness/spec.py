"""What is asked for: frozen, hashable specifications of a pair and of a single run. Imports no torch."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.errors import UsageError, unknown
from harness.seams import FaultRef

Mode = Literal["replay", "free"]
Engine = Literal["torch", "deepspeed"]
Condition = Literal["tape", "clean", "faulted", "null", "twin", "remedied"]
Model = Literal["original", "proxy"]


class Frozen(BaseModel):
    """Base of all specifications: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class SideSpec(Frozen):
    """How one side (trainer or rollout) holds and runs its weights.

    Attributes:
        dtype: Working precision of the weights.
        attention: Implementation name in transformers' attention registry.
        experts: Implementation name in transformers' experts registry.
        ops: ``library``, or every operator that has one is the fused Ascend operator (whatever ``attention`` and
            ``experts`` say): ``reference`` in plain torch, ``fused`` by torch_npu on an NPU.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    attention: str = "sdpa"
    experts: str = "grouped_mm"
    ops: Literal["library", "reference", "fused"] = "library"


class TaskSpec(Frozen):
    """Which prompts are drawn.

    Attributes:
        mixture: Names of verifiable tasks and their weights.
    """

    mixture: dict[str, float] = Field(
        default_factory=lambda: {"add": 1.0, "sub": 1.0, "reverse": 1.0, "sort": 1.0, "digit_sum": 1.0}
    )


class RLSpec(Frozen):
    """Settings of the RL step.

    Attributes:
        algorithm: ``grpo`` (token ratio, advantage over the group's mean and deviation), ``gspo`` (sequence ratio,
            the same advantage), ``ppo`` (token ratio, group mean as baseline, whitened over the batch).
        prompts_per_step: Different prompts of a step.
        group_size: Completions per prompt.
        updates_per_rollout: Mini-batches, hence optimiser steps, per rollout.
        micro_batches: Parts into which a mini-batch is split for the backward pass.
        max_new_tokens: Longest response, in tokens.
        temperature: Sampling temperature; log-probabilities are those of the tempered distribution.
        beta: Coefficient of the KL term to the frozen reference; 0 drops the reference.
        kl_estimator: k1, k2 or k3 of http://joschu.net/blog/kl-approx.html.
        clip_low: Lower clip range of the ratio, as a distance below 1.
        clip_high: Upper clip range of the ratio, as a distance above 1.
        dual_clip: Bound of the loss at negative advantage (arXiv 1912.09729); None for none.
        aggregation: ``token_mean`` over the mini-batch, or ``sequence_mean`` of per-sequence token means.
        aux_coef: Coefficient of the router's load-balancing loss in RL.
        old_logprobs: Whose log-probabilities the ratio is taken against.
        lr: Learning rate, constant.
        betas: AdamW's moments.
        eps: AdamW's epsilon.
        weight_decay: AdamW's weight decay.
        max_grad_norm: Global-norm clip; 0 for none.
        loss_scale: Static loss scale; 1 for none.
        skip_nonfinite: Skip the optimiser step when the gradient norm is not finite, as verl does.
        trainer: Precision and implementations of the trainer.
        rollout: Precision and implementations of the rollout.
    """

    algorithm: Literal["grpo", "gspo", "ppo"] = "grpo"
    prompts_per_step: int = Field(8, ge=1)
    group_size: int = Field(8, ge=2)
    updates_per_rollout: int = Field(4, ge=1)
    micro_batches: int = Field(2, ge=1)
    max_new_tokens: int = Field(8, ge=1)
    temperature: float = Field(1.0, gt=0)
    beta: float = Field(0.05, ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    clip_low: float = Field(0.2, ge=0)
    clip_high: float = Field(0.2, ge=0)
    dual_clip: float | None = Field(None, gt=1)
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    aux_coef: float = Field(0.0, ge=0)
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    lr: float = Field(1e-4, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, ge=0)
    loss_scale: float = Field(1.0, gt=0)
    skip_nonfinite: bool = True
    trainer: SideSpec = SideSpec()
    rollout: SideSpec = SideSpec()

    @model_validator(mode="after")
    def _divisible(self) -> RLSpec:
        sequences = self.prompts_per_step * self.group_size
        parts = self.updates_per_rollout * self.micro_batches
        if sequences % parts:
            raise ValueError(
                f"{sequences} sequences per step (prompts_per_step x group_size) cannot be split evenly into "
                f"{self.updates_per_rollout} mini-batches of {self.micro_batches} micro-batches"
            )
        return self


class OriginalSpec(Frozen):
    """The model under investigation: a recipe that is trained on demand, or a checkpoint folder."""

    recipe: str | None = None
    folder: str | None = None

    @model_validator(mode="after")
    def _one(self) -> OriginalSpec:
        if (self.recipe is None) == (self.folder is None):
            raise ValueError("original needs exactly one of recipe and folder")
        return self


class ProxySpec(Frozen):
    """The reduced model: built from the original, or a checkpoint folder.

    Attributes:
        experts: Experts to keep per layer.
        strategy: Name of the selection strategy.
        calibration_sequences: Sequences of task text that the selection is based on.
        folder: A ready checkpoint folder instead.
        ability_floor: Least share of the original's task score that a proxy must keep.
    """

    experts: int | None = Field(None, ge=1)
    strategy: str = "facility"
    calibration_sequences: int = Field(512, ge=1)
    folder: str | None = None
    ability_floor: float = Field(0.3, ge=0, le=1)

    @model_validator(mode="after")
    def _one(self) -> ProxySpec:
        if (self.experts is None) == (self.folder is None):
            raise ValueError("proxy needs exactly one of experts and folder")
        return self


class PairSpec(Frozen):
    """An original and its proxy with the task and the RL configuration that both run.

    Attributes:
        name: Name of the pair.
        original: Where the original comes from.
        proxy: Where the proxy comes from.
        task: Prompts.
        rl: RL settings.
        deepspeed: The DeepSpeed engine's JSON, used with ``engine: deepspeed``.
        steps: Steps of an arm.
        onset: Step at which a fault wakes.
        seeds: Number of seeds.
    """

    name: str
    original: OriginalSpec
    proxy: ProxySpec
    task: TaskSpec = TaskSpec()
    rl: RLSpec = RLSpec()
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    steps: int = Field(24, ge=2)
    onset: int = Field(8, ge=1)
    seeds: int = Field(3, ge=1)

    @model_validator(mode="after")
    def _onset_inside(self) -> PairSpec:
        if self.onset >= self.steps:
            raise ValueError(f"onset {self.onset} is not before the last of {self.steps} steps")
        return self


class RunSpec(Frozen):
    """One arm of one model at one seed: everything that decides its trace.

    Attributes:
        weights: Digest of the checkpoint (not its path: a moved folder is the same model).
        task: Prompts.
        rl: RL settings.
        engine: Training engine.
        deepspeed: The DeepSpeed engine's JSON.
        mode: ``free`` samples; ``replay`` trains on a tape.
        tape: Key of the run whose tape is replayed; None in free mode.
        steps: Number of steps.
        seed: Seed of every random draw.
        fault: The fault (or null control) that is installed, as plain data; None for a clean arm.
        remedy: The remedy that is installed around the fault, as plain data; None for none.
    """

    weights: str
    task: TaskSpec
    rl: RLSpec
    engine: Engine = "torch"
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    mode: Mode = "replay"
    tape: str | None = None
    steps: int
    seed: int
    fault: dict[str, Any] | None = None
    remedy: dict[str, Any] | None = None

    @property
    def fault_ref(self) -> FaultRef | None:
        """The fault as a value."""
        return None if self.fault is None else FaultRef.from_dict(self.fault)

    @property
    def remedy_ref(self) -> FaultRef | None:
        """The remedy as a value."""
        return None if self.remedy is None else FaultRef.from_dict(self.remedy)

    def key(self, code: str) -> str:
        """Return the content address of the run.

        Args:
            code: Digest of the code and library versions that will run it.

        Returns:
            32 hexadecimal digits.
        """
        text = json.dumps([self.model_dump(mode="json"), code], sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def pair_names() -> list[str]:
    """Names of the pairs that come with the package."""
    folder = importlib.resources.files("experiments") / "pairs"
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))


def load_pair(name_or_file: str) -> PairSpec:
    """Load a pair by name, or from a YAML file. Relative folders in a file are relative to that file.

    Raises:
        UsageError: If there is no such pair, or the file is not a valid pair.
    """
    if name_or_file.endswith((".yaml", ".yml")) or "/" in name_or_file:
        path = Path(name_or_file)
        if not path.is_file():
            raise UsageError(f"pair file {name_or_file} does not exist")
        return _parse_pair(path.read_text(encoding="utf-8"), str(path), path.resolve().parent)
    if name_or_file not in pair_names():
        raise unknown("pair", name_or_file, pair_names())
    source = importlib.resources.files("experiments") / "pairs" / f"{name_or_file}.yaml"
    return _parse_pair(source.read_text(encoding="utf-8"), f"pair {name_or_file}", None)


def _parse_pair(text: str, where: str, base: Path | None) -> PairSpec:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise UsageError(f"{where} is not valid YAML{line}: {getattr(e, 'problem', e)}") from None
    if not isinstance(data, Mapping):
        raise UsageError(f"{where} must be a mapping of settings, got {type(data).__name__}")
    pair = validate(PairSpec, data, where)
    if base is None:
        return pair
    return pair.model_copy(update={"original": _rebase(pair.original, base), "proxy": _rebase(pair.proxy, base)})


def _rebase(spec: Any, base: Path) -> Any:
    return spec if spec.folder is None else spec.model_copy(update={"folder": str(base / spec.folder)})


def validate(kind: type[Any], data: Any, where: str) -> Any:
    """Validate data against a specification, with an error that names the key and the value.

    Raises:
        UsageError: With one clause per offending key; unknown keys come with the nearest known ones.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as e:
        clauses = []
        for error in e.errors():
            key = ".".join(str(part) for part in error["loc"]) or "the whole"
            if error["type"] == "extra_forbidden":
                clauses.append(str(unknown("key", key, _known_keys(kind, error["loc"]))))
            else:
                clauses.append(f"{key}: {error['msg']} (got {error['input']!r})"[:300])
        raise UsageError(f"{where}: " + "; ".join(clauses)) from None


def _known_keys(kind: Any, location: tuple[Any, ...]) -> list[str]:
    for part in location[:-1]:
        field = kind.model_fields.get(part) if hasattr(kind, "model_fields") else None
        if field is None:
            return []
        kind = field.annotation
    return [".".join([*map(str, location[:-1]), name]) for name in getattr(kind, "model_fields", {})]
