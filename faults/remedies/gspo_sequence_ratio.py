"""Importance ratio of the whole sequence in place of the token's."""

from harness.catalogue import remedy
from harness.seams import Stage


@remedy(
    seam=Stage.LOSS,
    for_=[],
    seen_in=["https://arxiv.org/abs/2507.18071"],
)
def gspo_sequence_ratio(clean):
    """Every token of a sequence gets the geometric mean of the sequence's token ratios.

    What it does: single tokens whose probability jumps, as with other experts chosen, are averaged out before the clip.
    In the wild: proposed with the observation that token ratios of expert models are volatile under updates.
    What it costs: another objective: the clip range of token ratios is far too wide for sequence ratios.
    """

    def averaged(ctx, forward):
        def ratio(logprobs, old, mask):
            total = ((logprobs - old) * mask).sum(-1, keepdim=True)
            return (total / mask.sum(-1, keepdim=True).clamp(min=1)).exp().expand_as(logprobs)

        return clean(ctx.replacing(ratio=ratio), forward)

    return averaged
