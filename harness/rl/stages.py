"""The named stages of one RL step and the values that pass between them.

Shape suffixes used in this package: ``B`` sequences, ``P`` prompt length (left-padded), ``R`` response length
(right-padded), ``T = P + R``, ``V`` vocabulary, ``E`` experts, ``K`` experts chosen per token, ``N`` tokens.

Nothing here imports torch at run time, so that the catalogue of faults can be listed without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Stage(str, Enum):
    """The stages of one step, in the order in which the loop runs them."""

    PROMPTS = "prompts"
    ROLLOUT = "rollout"
    ROLLOUT_LOGPROBS = "rollout_logprobs"
    REWARD = "reward"
    ADVANTAGE = "advantage"
    OLD_LOGPROBS = "old_logprobs"
    LOGPROBS = "logprobs"
    LOSS = "loss"
    SCALE = "scale"
    BACKWARD = "backward"
    REDUCE = "reduce"
    UNSCALE = "unscale"
    CLIP = "clip"
    STEP = "step"
    SYNC = "sync"


TAPED = frozenset({Stage.ROLLOUT, Stage.REWARD})  # these only hand on what is there, in a run that replays a tape


@dataclass(frozen=True)
class Batch:
    """Sequences of one step; every stage up to ``old_logprobs`` fills one more field.

    Attributes:
        tokens: ``[B, T]`` int64, prompt left-padded, response right-padded.
        attention_mask: ``[B, T]`` int64, 1 on real tokens.
        response_mask: ``[B, R]`` float32, 1 on response tokens up to and including the end token.
        answers: Expected answer of each sequence, as text.
        completions: Generated answer of each sequence, as text.
        group_size: Consecutive sequences that share a prompt.
        rollout_logprobs: ``[B, R]`` float32, by the rollout weights.
        rewards: ``[B]`` float32.
        advantages: ``[B]`` float32.
        old_logprobs: ``[B, R]`` float32, by the trainer before the first update of the step.
        ref_logprobs: ``[B, R]`` float32, by the frozen reference; None where no KL term asks for it.
        loss_tokens: Response tokens of the whole mini-batch: the normaliser of a token mean.
        loss_sequences: Sequences of the whole mini-batch.
        routing: Router statistics of the ``old_logprobs`` pass (``router_entropy`` in nats, ``topk_mass``,
            ``expert_imbalance``: largest expert load over mean load), or empty.
    """

    tokens: torch.Tensor
    attention_mask: torch.Tensor
    response_mask: torch.Tensor
    answers: tuple[str, ...]
    completions: tuple[str, ...] = ()
    group_size: int = 1
    rollout_logprobs: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    loss_tokens: float = 0.0
    loss_sequences: int = 0
    routing: Mapping[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def with_(self, **changes: Any) -> Batch:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)

    def rows(self, start: int, stop: int) -> Batch:
        """Return sequences ``start`` to ``stop`` (exclusive)."""
        cut: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, tuple) or hasattr(value, "dtype"):
                cut[f.name] = value[start:stop]
        return replace(self, **cut)

    def split(self, parts: int) -> Iterator[Batch]:
        """Yield ``parts`` consecutive slices of equal length.

        Raises:
            ValueError: If the sequences cannot be split evenly.
        """
        if len(self) % parts:
            raise ValueError(f"{len(self)} sequences cannot be split into {parts} equal parts")
        size = len(self) // parts
        for start in range(0, len(self), size):
            yield self.rows(start, start + size)

    def mini_batches(self, parts: int) -> Iterator[Batch]:
        """Yield the mini-batches of a step, each knowing its own number of response tokens and sequences."""
        for mini in self.split(parts):
            yield mini.with_(loss_tokens=float(mini.response_mask.sum()), loss_sequences=len(mini))


@dataclass(frozen=True)
class Forward:
    """What the trainer's forward pass over one micro-batch gives.

    Attributes:
        batch: The micro-batch.
        logprobs: ``[B, R]`` float32 with gradient.
        entropy: ``[B, R]`` float32, of the tempered distribution, without gradient.
        aux_loss: Scalar router load-balancing loss with gradient, or None.
    """

    batch: Batch
    logprobs: torch.Tensor
    entropy: torch.Tensor
    aux_loss: torch.Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """Loss of one micro-batch: its share of the mini-batch loss, and the terms it was made of.

    Attributes:
        value: Scalar with gradient; the sum over the micro-batches is the loss of the mini-batch.
        terms: Detached parts for the record, each ``[B, R]``: ``ratio``, ``clipped`` (0 or 1), and ``kl`` if used.
        forward: What it was computed from.
    """

    value: torch.Tensor
    terms: Mapping[str, torch.Tensor]
    forward: Forward


@dataclass(frozen=True)
class Grads:
    """Gradients of one mini-batch.

    Attributes:
        named: Gradient by parameter name. Tensors may be changed in place.
        norm: Global L2 norm before clipping, once the clip stage has measured it; None before, or if not known.
    """

    named: Mapping[str, torch.Tensor]
    norm: float | None = None

    def with_(self, **changes: Any) -> Grads:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Update:
    """Outcome of one optimiser step.

    Attributes:
        skipped: True if no parameter was to change.
        lr: Learning rate that was used.
        norm: Global L2 norm before clipping, from an engine that measures it inside the step; None otherwise.
    """

    skipped: bool
    lr: float
    norm: float | None = None


@dataclass(frozen=True)
class Ops:
    """The small pure functions that the stages are made of; a fault may run a stage with another one.

    Attributes:
        logprob: ``(logits [B, R, V], tokens [B, R], temperature) -> [B, R]`` log-probability of the tokens.
        entropy: ``(logits [B, R, V], temperature) -> [B, R]`` entropy in nats.
        ratio: ``(logprobs, old_logprobs, mask) -> [B, R]`` importance ratio.
        surrogate: ``(ratio, advantages [B, 1], spec) -> ([B, R] loss, [B, R] clipped)`` clipped policy loss.
        kl: ``(logprobs, ref_logprobs) -> [B, R]`` estimate of the KL divergence to the reference.
        aggregate: ``(values [B, R], batch) -> scalar`` this micro-batch's share of the mini-batch mean.
    """

    logprob: Callable[..., torch.Tensor]
    entropy: Callable[..., torch.Tensor]
    ratio: Callable[..., torch.Tensor]
    surrogate: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    kl: Callable[..., torch.Tensor]
    aggregate: Callable[..., torch.Tensor]


StageFn = Callable[..., Any]


class Stages:
    """The table of stages that the loop runs: one callable per stage, looked up by name at every call.

    Swapping an entry is how a fault is woken; there is nothing else in the loop to know about faults.
    """

    prompts: StageFn
    rollout: StageFn
    rollout_logprobs: StageFn
    reward: StageFn
    advantage: StageFn
    old_logprobs: StageFn
    logprobs: StageFn
    loss: StageFn
    scale: StageFn
    backward: StageFn
    reduce: StageFn
    unscale: StageFn
    clip: StageFn
    step: StageFn
    sync: StageFn

    def __init__(self, table: Mapping[Stage, StageFn]) -> None:
        missing = [s.value for s in Stage if s not in table]
        if missing:
            raise ValueError(f"no implementation for stage {', '.join(missing)}")
        for stage, function in table.items():
            setattr(self, stage.value, function)

    def __getitem__(self, stage: Stage) -> StageFn:
        function: StageFn = getattr(self, stage.value)
        return function

    def __setitem__(self, stage: Stage, function: StageFn) -> None:
        setattr(self, stage.value, function)
