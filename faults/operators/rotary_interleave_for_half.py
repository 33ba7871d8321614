"""Rotary embedding paired the wrong way."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Operator


@fault(
    seam=Operator("npu_rotary_mul", side="trainer"),
    seen_in=[
        "https://github.com/vllm-project/vllm-ascend/issues/13631",
        "https://github.com/vllm-project/vllm-ascend/issues/2847",
        "https://github.com/sgl-project/sgl-kernel-npu/issues/503",
        "https://github.com/sgl-project/sglang/issues/36959",
    ],
    expects=[Rises("logprob_gap"), Rises("kl")],
    look_alikes=["swiglu_gate_up_swap"],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.83 [0.67, 0.88]: the interval straddles the bar",
)
def rotary_interleave_for_half(clean):
    """The rotary operator is asked for the other pairing of dimensions than the weights were trained with.

    What breaks: dimension 2i is rotated with 2i + 1 in place of i with i + D/2 (or the reverse), by the cosines of the
        right layout, so that queries and keys no longer agree on distances.
    In the wild: ``rotary_mode`` of the fused Ascend operators, and the layout of the cache of cosines beside it.
    Looks like: log-probabilities off at once, KL up; only attention is touched, so a pruned model shows all of it.
    """

    def faulty(ctx, x, cos, sin, rotary_mode="half", rotate=None):
        other = {"half": "interleave", "interleave": "half"}[rotary_mode]
        return clean(x, cos, sin, rotary_mode=other, rotate=rotate)

    return faulty
