"""Tokens dropped on which rollout and trainer disagree."""

from harness.catalogue import remedy
from harness.seams import Stage


@remedy(
    seam=Stage.LOSS,
    for_=[],
    seen_in=[
        "https://github.com/verl-project/verl/pull/3750",
        "https://github.com/modelscope/ms-swift/pull/6678",
    ],
)
def masked_importance_sampling(clean, *, low=0.5, high=2.0):
    """A token whose ratio of trainer to rollout probability leaves [low, high] takes no part in the policy loss.

    What it does: removes the heavy tail of the mismatch, and with it the gradients of tokens that the trainer would
        hardly have sampled.
    In the wild: the mask mode of rollout correction in two trainers, beside the mode that truncates.
    What it costs: with a large constant mismatch most tokens are dropped and little is learnt.
    """

    def corrected(ctx, forward):
        batch, surrogate = forward.batch, ctx.ops.surrogate
        ratio = ((batch.old_logprobs - batch.rollout_logprobs) * batch.response_mask).exp()
        kept = ((ratio >= low) & (ratio <= high)).float()

        def masked(ratio, advantages, rl):
            loss, clipped = surrogate(ratio, advantages, rl)
            return (loss * kept).nan_to_num(nan=0.0) if not kept.all() else loss, clipped

        return clean(ctx.replacing(surrogate=masked), forward)

    return corrected
