"""Correction bias of the choice of experts left in their weights."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Operator


@fault(
    seam=Operator("npu_moe_gating_top_k", side="trainer"),
    seen_in=[
        "https://github.com/vllm-project/vllm/pull/12002",
        "https://github.com/huggingface/transformers/pull/39581",
        "https://github.com/PaddlePaddle/PaddleFleet/pull/329",
    ],
    expects=[Rises("logprob_gap")],
    moe=True,
    needs=["router", "correction_bias"],
    look_alikes=["norm_topk_prob_ignored"],
    expected_verdict="INCONCLUSIVE",
    reason="not run yet: no pair has a router with a correction bias",
)
def correction_bias_in_weights(clean):
    """The weights of the chosen experts are taken from the biased scores that were meant for the choice alone.

    What breaks: the bias that balances the experts' load flows into the mixture, so favoured experts weigh too much and
        an expert whose biased score is below zero weighs less than nothing.
    In the wild: routers with a correction bias in engines and libraries that had one tensor for both purposes.
    Looks like: a constant log-probability gap that grows with the spread of the bias; no effect while the bias is zero.
    """

    def faulty(ctx, x, k, *, bias=None, routed_scaling_factor=1.0, eps=1e-20, **kwargs):
        given = {"bias": bias, "routed_scaling_factor": routed_scaling_factor, "eps": eps, **kwargs}
        weights, experts, scores = clean(x, k, **given)
        if bias is None:
            return weights, experts, scores
        by_sigmoid = kwargs.get("norm_type", 0) == 1
        unbiased = x.sigmoid() if by_sigmoid else x.softmax(-1)
        biased = (unbiased + bias).gather(-1, experts.long())
        if by_sigmoid:
            biased = biased / (biased.sum(-1, keepdim=True) + eps)
        return (biased * routed_scaling_factor).to(weights.dtype), experts, scores

    return faulty
