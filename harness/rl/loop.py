"""The inner spine: one RL post-training run, always in this order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.rl.context import Context
    from harness.rl.stages import Stages


def run(stages: Stages, contexts: Iterable[Context]) -> None:
    """Run one step per context.

    Args:
        stages: The table of stages. Entries are looked up at every call.
        contexts: One context per step. Whoever wraps this iterable acts between two steps.
    """
    for ctx in contexts:
        batch = stages.prompts(ctx)
        batch = stages.rollout(ctx, batch)
        batch = stages.rollout_logprobs(ctx, batch)
        batch = stages.reward(ctx, batch)
        batch = stages.advantage(ctx, batch)
        batch = stages.old_logprobs(ctx, batch)
        for mini in batch.mini_batches(ctx.rl.updates_per_rollout):
            for micro in mini.split(ctx.rl.micro_batches):
                forward = stages.logprobs(ctx, micro)
                loss = stages.loss(ctx, forward)
                scaled = stages.scale(ctx, loss)
                stages.backward(ctx, scaled)
            grads = stages.reduce(ctx, mini)
            grads = stages.unscale(ctx, grads)
            grads = stages.clip(ctx, grads)
            update = stages.step(ctx, grads)
        stages.sync(ctx, update)
