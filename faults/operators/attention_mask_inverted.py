"""Attention mask with the opposite meaning of True."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Operator


@fault(
    seam=Operator("npu_fusion_attention", side="trainer"),
    seen_in=[
        "https://github.com/Ascend/pytorch/issues/88",
        "https://github.com/flagos-ai/Torch-FL/pull/330",
    ],
    expects=[Rises("logprob_gap"), Rises("kl")],
    look_alikes=["attention_scale_left_at_one", "rotary_interleave_for_half"],
)
def attention_mask_inverted(clean):
    """The attention operator gets a mask in which True means keep, and takes it to mean masked out.

    What breaks: every token attends to the future and to the padding, and to nothing of its own past.
    In the wild: scaled_dot_product_attention keeps where a boolean mask is True, npu_fusion_attention masks there; a
        bridge between the two has to invert it exactly once.
    Looks like: log-probabilities off by nats at once, KL and gradient norm up.
    """

    def faulty(ctx, *args, atten_mask=None, **kwargs):
        return clean(*args, atten_mask=None if atten_mask is None else ~atten_mask.bool(), **kwargs)

    return faulty
