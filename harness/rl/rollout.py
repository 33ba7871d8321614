"""The rollout side: prompts, sampling with a KV cache, rewards; and their counterparts that replay a tape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from harness.errors import HarnessError
from harness.rl.policy import positions
from harness.rl.stages import Batch, Stage, StageFn
from harness.rl.tasks import prompt_batch, reward_of

if TYPE_CHECKING:
    from harness.rl.context import Context
    from harness.rl.policy import Policy
    from harness.rl.stages import Ops, Update


def prompts(ctx: Context) -> Batch:
    """Draw the prompts of a step, each repeated for its group, left-padded."""
    problems = prompt_batch(ctx.task, ctx.seed, ctx.step, ctx.rl.prompts_per_step)
    repeated = [p for p in problems for _ in range(ctx.rl.group_size)]
    encoded = ctx.tokenizer([p.prompt for p in repeated], return_tensors="pt", padding=True, padding_side="left")
    return Batch(
        tokens=encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        response_mask=torch.zeros(len(repeated), 0),
        answers=tuple(p.answer for p in repeated),
        group_size=ctx.rl.group_size,
    )


def rollout(ctx: Context, batch: Batch) -> Batch:
    """Sample a response to every prompt and record the sampler's own log-probabilities."""
    uniforms = torch.rand(len(batch), ctx.rl.max_new_tokens, generator=ctx.rng("sampling"))
    tokens, mask, logprobs = sample(ctx.rollout, batch, uniforms, ctx.rl.temperature, ctx.ops, ctx.tokenizer)
    texts = ctx.tokenizer.batch_decode(
        [t[m.bool()] for t, m in zip(tokens, mask, strict=True)], skip_special_tokens=True
    )
    return batch.with_(
        tokens=torch.cat([batch.tokens, tokens], 1),
        attention_mask=torch.cat([batch.attention_mask, mask.long()], 1),
        response_mask=mask,
        completions=tuple(texts),
        rollout_logprobs=logprobs,
    )


@torch.no_grad()
def sample(
    policy: Policy, batch: Batch, uniforms: torch.Tensor, temperature: float, ops: Ops, tokenizer: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample by inverse transform with a KV cache.

    Args:
        policy: Weights to sample from.
        batch: Left-padded prompts.
        uniforms: ``[B, R]`` in [0, 1): one number per token, so that a row's tokens do not depend on other rows.
        temperature: Of the distribution that is sampled.
        ops: Gives ``logprob``.
        tokenizer: Gives the end and padding tokens.

    Returns:
        Tokens ``[B, R]`` int64 (padding after the end), mask ``[B, R]`` float32 (1 up to and including the end),
        log-probabilities ``[B, R]`` float32 (0 on padding).
    """
    from transformers import DynamicCache

    rows, length = uniforms.shape
    tokens = torch.full((rows, length), tokenizer.pad_token_id)
    mask, logprobs = torch.zeros(rows, length), torch.zeros(rows, length)
    cache = DynamicCache(config=policy.model.config)
    attention, fed, where = batch.attention_mask, batch.tokens, positions(batch.attention_mask)
    active = torch.ones(rows, dtype=torch.bool)
    for t in range(length):
        logits = policy.model(
            input_ids=fed, attention_mask=attention, position_ids=where, cache=cache, logits_to_keep=1
        ).logits.float()
        cdf = (logits[:, 0] / temperature).softmax(-1).cumsum(-1)
        drawn = torch.searchsorted(cdf, uniforms[:, t : t + 1] * cdf[:, -1:], right=True)
        drawn = drawn.clamp(max=cdf.shape[-1] - 1)
        tokens[active, t] = drawn[active, 0]
        mask[:, t] = active.float()
        logprobs[:, t] = ops.logprob(logits, drawn, temperature)[:, 0] * active
        attention = torch.cat([attention, active[:, None].long()], 1)
        active = active & (drawn[:, 0] != tokenizer.eos_token_id)
        if not active.any():
            break
        fed, where = drawn, where[:, -1:] + 1
    return tokens, mask, logprobs


def keep(ctx: Context, batch: Batch) -> Batch:
    """Leave as it is what the sampler, or the tape, already filled in."""
    return batch


@torch.no_grad()
def force_logprobs(ctx: Context, batch: Batch) -> Batch:
    """Recompute the rollout side's log-probabilities by teacher forcing on a taped response."""
    scores = ctx.rollout.score(batch, ctx.ops, ctx.rl.temperature)
    return batch.with_(rollout_logprobs=scores.logprobs * batch.response_mask)


def reward(ctx: Context, batch: Batch) -> Batch:
    """Score every completion against its answer."""
    values = [reward_of(a, c) for a, c in zip(batch.answers, batch.completions, strict=True)]
    return batch.with_(rewards=torch.tensor(values, dtype=torch.float32))


def sync(ctx: Context, update: Update) -> None:
    """Give the trainer's weights to the rollout side."""
    ctx.rollout.load_from(ctx.trainer)


def free_stages() -> dict[Stage, StageFn]:
    """Return the stages of a run that samples for itself."""
    return {
        Stage.PROMPTS: prompts,
        Stage.ROLLOUT: rollout,
        Stage.ROLLOUT_LOGPROBS: keep,
        Stage.REWARD: reward,
        Stage.SYNC: sync,
    }


FIELDS = ("tokens", "attention_mask", "response_mask", "rollout_logprobs", "rewards")


class TapeRecorder:
    """Keeps what a clean run sampled and earned, for other arms to train on."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def keep(self, step: int, batch: Batch) -> None:
        """Keep one step."""
        for name in FIELDS:
            self._tensors[f"{step:05d}/{name}"] = getattr(batch, name).contiguous()

    def save(self, path: Path) -> None:
        """Write the tape as safetensors."""
        from safetensors.torch import save_file

        save_file(self._tensors, path, metadata={"schema": "harness/tape@1"})


class Tape:
    """A recorded run's rollouts and rewards, served in place of the stages that would make them."""

    def __init__(self, path: Path) -> None:
        from safetensors.torch import load_file

        self._path = path
        self._tensors = load_file(path)

    def stages(self) -> dict[Stage, StageFn]:
        """Return the stages of a run that trains on this tape."""
        return {
            Stage.PROMPTS: self.prompts,
            Stage.ROLLOUT: keep,
            Stage.ROLLOUT_LOGPROBS: force_logprobs,
            Stage.REWARD: keep,
            Stage.SYNC: sync,
        }

    def prompts(self, ctx: Context) -> Batch:
        """Serve the whole recorded step."""
        prefix = f"{ctx.step:05d}/"
        if prefix + "tokens" not in self._tensors:
            raise HarnessError(f"tape {self._path} holds no step {ctx.step}; it was recorded with fewer steps")
        found = {name: self._tensors[prefix + name] for name in FIELDS}
        return Batch(answers=(), group_size=ctx.rl.group_size, **found)
