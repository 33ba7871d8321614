"""The clean stages of the trainer's side: advantage, log-probabilities and loss of GRPO, GSPO and PPO-clip.

GRPO: arXiv 2402.03300. GSPO: arXiv 2507.18071. PPO-clip: arXiv 1707.06347, dual clip: arXiv 1912.09729.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from harness.rl.stages import Batch, Forward, Loss, Ops, Stage, StageFn

if TYPE_CHECKING:
    from harness.rl.context import Context
    from harness.spec import RLSpec

GROUP_EPS = 1e-4  # added to a group's deviation, as in the implementations in common use


def token_logprob(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probability of tokens under the tempered distribution: ``[B, R, V]``, ``[B, R]`` -> ``[B, R]``."""
    scaled = logits / temperature
    return scaled.gather(-1, tokens[..., None]).squeeze(-1) - scaled.logsumexp(-1)


def token_entropy(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Entropy in nats of the tempered distribution: ``[B, R, V]`` -> ``[B, R]``."""
    logp = torch.log_softmax(logits / temperature, -1)
    return -(logp.exp() * logp).sum(-1)


def token_ratio(logprobs: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Importance ratio of every token: ``[B, R]``, 1 on padding."""
    return ((logprobs - old) * mask).exp()


def sequence_ratio(logprobs: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Length-normalised importance ratio of every sequence, on each of its tokens: ``[B, R]`` (GSPO, equation 7)."""
    log_ratio = ((logprobs - old) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return log_ratio.exp().expand_as(logprobs)


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, rl: RLSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped policy loss per token and where the clip is in force: ``[B, R]``, ``[B, 1]`` -> two ``[B, R]``."""
    low, high = 1.0 - rl.clip_low, 1.0 + rl.clip_high
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if rl.dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -rl.dual_clip * advantages), loss)
    clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
    return loss, clipped.float()


def kl_k1(logprobs: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """Unbiased estimate of KL(policy || reference), of either sign."""
    return logprobs - ref


def kl_k2(logprobs: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """Half the squared log-ratio."""
    return (logprobs - ref).square() / 2


def kl_k3(logprobs: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """Unbiased estimate that is never negative: ``exp(d) - d - 1`` with ``d = ref - logprobs``."""
    d = ref - logprobs
    return d.exp() - d - 1


def token_mean(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """This micro-batch's share of the mean over all response tokens of the mini-batch."""
    return (values * batch.response_mask).sum() / max(batch.loss_tokens, 1.0)


def sequence_mean(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """This micro-batch's share of the mean over sequences of per-sequence token means."""
    lengths = batch.response_mask.sum(-1).clamp(min=1)
    return ((values * batch.response_mask).sum(-1) / lengths).sum() / batch.loss_sequences


KL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def clean_ops(rl: RLSpec) -> Ops:
    """Return the correct small functions for a set of RL settings."""
    return Ops(
        logprob=token_logprob,
        entropy=token_entropy,
        ratio=sequence_ratio if rl.algorithm == "gspo" else token_ratio,
        surrogate=clipped_surrogate,
        kl=KL[rl.kl_estimator],
        aggregate=token_mean if rl.aggregation == "token_mean" else sequence_mean,
    )


def advantage(ctx: Context, batch: Batch) -> Batch:
    """Fill ``advantages``: rewards against their group."""
    assert batch.rewards is not None
    groups = batch.rewards.view(-1, batch.group_size)
    centred = groups - groups.mean(1, keepdim=True)
    if ctx.rl.algorithm == "ppo":
        flat = centred.flatten()
        return batch.with_(advantages=(flat - flat.mean()) / (flat.std() + 1e-8))
    scaled = centred / (groups.std(1, keepdim=True) + GROUP_EPS)
    return batch.with_(advantages=scaled.flatten())


@torch.no_grad()
def old_logprobs(ctx: Context, batch: Batch) -> Batch:
    """Fill ``old_logprobs`` and ``ref_logprobs``, once before the first update of the step."""
    rl = ctx.rl
    scores = ctx.trainer.score(batch, ctx.ops, rl.temperature, routing=True)
    old = scores.logprobs if rl.old_logprobs == "trainer" else batch.rollout_logprobs
    ref = None
    if ctx.reference is not None:
        ref = ctx.reference.score(batch, ctx.ops, rl.temperature).logprobs
    return batch.with_(old_logprobs=old, ref_logprobs=ref, routing=scores.routing)


def logprobs(ctx: Context, micro: Batch) -> Forward:
    """The trainer's forward pass over a micro-batch, with gradient."""
    scores = ctx.trainer.score(micro, ctx.ops, ctx.rl.temperature, aux=ctx.rl.aux_coef > 0)
    return Forward(micro, scores.logprobs, scores.entropy, scores.aux_loss)


def loss(ctx: Context, forward: Forward) -> Loss:
    """This micro-batch's share of the mini-batch loss."""
    rl, ops, batch = ctx.rl, ctx.ops, forward.batch
    assert batch.advantages is not None
    assert batch.old_logprobs is not None
    ratio = ops.ratio(forward.logprobs, batch.old_logprobs, batch.response_mask)
    per_token, clipped = ops.surrogate(ratio, batch.advantages[:, None], rl)
    terms = {"ratio": ratio.detach(), "clipped": clipped}
    if batch.ref_logprobs is not None:
        kl = ops.kl(forward.logprobs, batch.ref_logprobs)
        per_token = per_token + rl.beta * kl
        terms["kl"] = kl.detach()
    value = ops.aggregate(per_token, batch)
    if forward.aux_loss is not None:
        value = value + rl.aux_coef * forward.aux_loss * (len(batch) / batch.loss_sequences)
    return Loss(value, terms, forward)


def stages() -> dict[Stage, StageFn]:
    """Return the stages of this file."""
    return {
        Stage.ADVANTAGE: advantage,
        Stage.OLD_LOGPROBS: old_logprobs,
        Stage.LOGPROBS: logprobs,
        Stage.LOSS: loss,
    }
