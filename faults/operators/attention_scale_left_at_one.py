"""Attention scores not divided by the root of the head dimension."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Operator


@fault(
    seam=Operator("npu_fusion_attention", side="trainer"),
    seen_in=[
        "https://github.com/huggingface/transformers/pull/37575",
        "https://github.com/mlc-ai/mlc-llm/pull/3426",
    ],
    expects=[Rises("logprob_gap"), Rises("kl")],
    look_alikes=["attention_mask_inverted", "rotary_interleave_for_half"],
)
def attention_scale_left_at_one(clean):
    """The scale of the attention operator is left at its default, which is 1 and not 1 / sqrt(D).

    What breaks: scores are sqrt(D) times too large, so attention is close to an argmax, forward and backward.
    In the wild: npu_fusion_attention defaults to 1 where flash-attn defaults to 1 / sqrt(D), so a wrapper that passes
        None on, or nothing, is wrong on one of the two.
    Looks like: log-probabilities off at once, KL up.
    """

    def faulty(ctx, *args, scale=1.0, **kwargs):
        return clean(*args, **kwargs)

    return faulty
