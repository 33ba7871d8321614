"""Tokens weighted by how likely the trainer finds what the rollout sampled, up to a cap."""

from harness.catalogue import remedy
from harness.seams import Stage


@remedy(
    seam=Stage.LOSS,
    for_=["stale_rollout_weights"],
    seen_in=[
        "https://github.com/verl-project/verl/pull/2953",
        "https://github.com/huggingface/trl/pull/3867",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/1300",
    ],
)
def truncated_importance_sampling(clean, *, cap=2.0):
    """The policy loss of a token is multiplied by min(exp(old - rollout log-probability), cap).

    What it does: corrects for tokens that came from another distribution than the trainer takes them to come from,
        whatever made the two differ; the cap bounds the variance.
    In the wild: the usual answer to two engines whose log-probabilities disagree; caps of 2 and less are in use.
    What it costs: tokens above the cap stay biased, and the gap itself stays: log-probabilities still disagree.
    """

    def corrected(ctx, forward):
        batch, surrogate = forward.batch, ctx.ops.surrogate
        gap = (batch.old_logprobs - batch.rollout_logprobs) * batch.response_mask
        weight = gap.exp().clamp(max=cap)

        def weighted(ratio, advantages, rl):
            loss, clipped = surrogate(ratio, advantages, rl)
            return loss * weight, clipped

        return clean(ctx.replacing(surrogate=weighted), forward)

    return corrected
