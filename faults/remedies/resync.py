"""Rollout given the trainer's weights once more."""

from harness.catalogue import remedy
from harness.seams import Stage


@remedy(
    seam=Stage.SYNC,
    for_=["stale_rollout_weights"],
    seen_in=[
        "https://github.com/huggingface/trl/issues/5312",
        "https://github.com/huggingface/trl/issues/3679",
    ],
)
def resync(clean):
    """After whatever hands weights over, every weight is copied from the trainer to the rollout.

    What it does: makes up for a hand-over that was left out, came too early, or left some weights behind.
    In the wild: reloading the weights after an engine has woken up is how users got round stale ones.
    What it costs: a second transfer of all weights in every step.
    """

    def copied(ctx, update):
        result = clean(ctx, update)
        ctx.rollout.load_from(ctx.trainer)
        return result

    return copied
