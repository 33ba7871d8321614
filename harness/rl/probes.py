"""What is measured at each stage, and the recording wrap that is put around the stages last."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from harness.rl.stages import Batch, Forward, Grads, Loss, Stage, Stages, Update
from harness.trace import StepRecord

if TYPE_CHECKING:
    from harness.rl.context import Context
    from harness.rl.policy import Policy


@dataclass
class Observation:
    """What passed between the stages of one step, detached.

    Attributes:
        batch: The batch as the ``old_logprobs`` stage left it.
        losses: Per micro-batch: its share of the mini-batch loss.
        forwards: Per micro-batch: the trainer's forward pass.
        norms: Per mini-batch: the global norm that the clip stage reported, else the step stage, or None.
        group_norms: Per mini-batch: L2 norm of each parameter group before clipping.
        updates: Per mini-batch: what the step stage reported.
        update_norm: L2 norm of the change of the trainer's weights over the step.
    """

    batch: Batch | None = None
    losses: list[Loss] = field(default_factory=list)
    forwards: list[Forward] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    group_norms: list[dict[str, float]] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    update_norm: float | None = None

    def tokens(self, name: str) -> torch.Tensor:
        """Return a loss term on every response token of the step: ``[N]``."""
        return torch.cat([x.terms[name][x.forward.batch.response_mask.bool()] for x in self.losses])


def mean(values: Iterable[float | None]) -> float | None:
    """Mean that keeps NaN and infinities; None if a value is missing or there is none."""
    every = list(values)
    known = [v for v in every if v is not None]
    return sum(known) / len(known) if known and len(known) == len(every) else None


def loss(seen: Observation) -> float:
    """Mean over the mini-batches of their losses."""
    minis = len(seen.updates) or 1
    return float(torch.stack([x.value.detach() for x in seen.losses]).double().sum()) / minis


def grad_norm(seen: Observation) -> float | None:
    """Mean over the mini-batches of the global gradient norm before clipping."""
    return mean(seen.norms)


def entropy(seen: Observation) -> float:
    """Mean over response tokens of the policy's entropy in nats, by the trainer's forward passes."""
    values = torch.cat([f.entropy[f.batch.response_mask.bool()] for f in seen.forwards])
    return float(values.double().mean())


def kl(seen: Observation) -> float | None:
    """Mean over response tokens of the KL estimate to the reference; missing without a reference."""
    if "kl" not in seen.losses[0].terms:
        return None
    return float(seen.tokens("kl").double().mean())


def reward(seen: Observation) -> float | None:
    """Mean reward."""
    assert seen.batch is not None
    return None if seen.batch.rewards is None else float(seen.batch.rewards.double().mean())


def ratio_mean(seen: Observation) -> float:
    """Mean importance ratio over response tokens."""
    return float(seen.tokens("ratio").double().mean())


def ratio_max(seen: Observation) -> float:
    """Largest importance ratio."""
    return float(seen.tokens("ratio").max())


def clip_fraction(seen: Observation) -> float:
    """Share of response tokens at which the clip is in force."""
    return float(seen.tokens("clipped").double().mean())


def _gap(seen: Observation) -> torch.Tensor:
    batch = seen.batch
    assert batch is not None
    assert batch.rollout_logprobs is not None
    assert batch.old_logprobs is not None
    return (batch.rollout_logprobs - batch.old_logprobs)[batch.response_mask.bool()].abs()


def logprob_gap(seen: Observation) -> float:
    """Mean over response tokens of |rollout log-probability - trainer log-probability|."""
    return float(_gap(seen).double().mean())


def logprob_gap_max(seen: Observation) -> float:
    """Largest gap between the rollout's and the trainer's log-probability of a token."""
    return float(_gap(seen).max())


def response_length(seen: Observation) -> float:
    """Mean response length in tokens."""
    assert seen.batch is not None
    return float(seen.batch.response_mask.sum(1).double().mean())


def tokens(seen: Observation) -> float:
    """Response tokens of the step."""
    assert seen.batch is not None
    return float(seen.batch.response_mask.sum())


def update_norm(seen: Observation) -> float | None:
    """L2 norm of the change of the trainer's weights over the step."""
    return seen.update_norm


def skipped_steps(seen: Observation) -> float:
    """Optimiser steps that were skipped."""
    return float(sum(u.skipped for u in seen.updates))


def lr(seen: Observation) -> float | None:
    """Learning rate of the last optimiser step."""
    return seen.updates[-1].lr if seen.updates else None


def _group_norm(group: str) -> Callable[[Observation], float | None]:
    def measure(seen: Observation) -> float | None:
        return mean(norms.get(group) for norms in seen.group_norms)

    measure.__doc__ = f"Mean over the mini-batches of the gradient norm of group {group} before clipping."
    return measure


def _routing(name: str) -> Callable[[Observation], float | None]:
    def measure(seen: Observation) -> float | None:
        assert seen.batch is not None
        return seen.batch.routing.get(name)

    measure.__doc__ = f"Router statistic {name} of the trainer before the first update of the step."
    return measure


def clean_probes(groups: Iterable[str]) -> dict[str, Callable[[Observation], float | None]]:
    """Return the measurements by metric name; a fault on a ``Probe`` seam replaces one of them."""
    plain = (
        loss,
        grad_norm,
        entropy,
        reward,
        kl,
        ratio_mean,
        ratio_max,
        clip_fraction,
        logprob_gap,
        logprob_gap_max,
        response_length,
        update_norm,
        skipped_steps,
        lr,
        tokens,
    )
    table: dict[str, Callable[[Observation], float | None]] = {f.__name__: f for f in plain}
    table.update({f"grad_norm/{group}": _group_norm(group) for group in groups})
    table.update({name: _routing(name) for name in ("router_entropy", "topk_mass", "expert_imbalance")})
    return table


class Recorder:
    """Watches the stages from outside and turns each step into a record.

    Attributes:
        probes: The measurements, by metric name.
        stages: The wrapped table, to be given to the loop.
    """

    def __init__(self, inner: Stages, trainer: Policy, emit: Callable[[StepRecord], None]) -> None:
        self._inner, self._emit, self._whole = inner, emit, trainer.whole
        self._weights = [p for p in trainer.model.parameters() if p.requires_grad]
        with self._whole():
            self._before = [torch.empty_like(p) for p in self._weights]
        self._groups = trainer.parameter_groups()
        self._seen = Observation()
        self.probes: dict[str, Callable[..., Any]] = dict(clean_probes(self._groups))
        table = {stage: self._passing(stage) for stage in Stage}
        table[Stage.OLD_LOGPROBS] = self._old_logprobs
        table[Stage.LOSS] = self._loss
        table[Stage.CLIP] = self._clip
        table[Stage.STEP] = self._step
        self.stages = Stages(table)

    def _passing(self, stage: Stage) -> Callable[..., Any]:
        name, inner = stage.value, self._inner

        def call(*args: Any) -> Any:
            return getattr(inner, name)(*args)

        return call

    def _old_logprobs(self, ctx: Context, batch: Batch) -> Batch:
        self._seen.batch = self._inner.old_logprobs(ctx, batch)
        return self._seen.batch

    def _loss(self, ctx: Context, forward: Forward) -> Loss:
        result: Loss = self._inner.loss(ctx, forward)
        self._seen.losses.append(result)
        self._seen.forwards.append(forward)
        return result

    def _clip(self, ctx: Context, grads: Grads) -> Grads:
        self._seen.group_norms.append(self._norms_by_group(grads))
        result: Grads = self._inner.clip(ctx, grads)
        self._seen.norms.append(result.norm)
        return result

    def _norms_by_group(self, grads: Grads) -> dict[str, float]:
        if not grads.named:
            return {}
        names = list(grads.named)
        norms = torch.stack(torch._foreach_norm([grads.named[n] for n in names], 2, dtype=torch.float32))
        squares = dict(zip(names, norms.double().square().tolist(), strict=True))
        return {
            group: math.sqrt(sum(squares[n] for n in members if n in squares))
            for group, members in self._groups.items()
        }

    def _step(self, ctx: Context, grads: Grads) -> Update:
        update: Update = self._inner.step(ctx, grads)
        self._seen.updates.append(update)
        if self._seen.norms[-1] is None:
            self._seen.norms[-1] = update.norm
        return update

    def steps(self, contexts: Iterable[Context]) -> Iterator[Context]:
        """Pass contexts through to the loop and emit a record after each step."""
        for ctx in contexts:
            self._seen = Observation()
            with torch.no_grad(), self._whole():
                torch._foreach_copy_(self._before, self._weights)
            yield ctx
            with torch.no_grad(), self._whole():
                moved = torch._foreach_norm(torch._foreach_sub(self._weights, self._before), 2, dtype=torch.float32)
                self._seen.update_norm = float(torch.linalg.vector_norm(torch.stack(moved)))
                self._emit(self._measure(ctx.step))

    def _measure(self, step: int) -> StepRecord:
        values = {name: probe(self._seen) for name, probe in self.probes.items()}
        return StepRecord(step, {name: float(v) for name, v in values.items() if v is not None})
