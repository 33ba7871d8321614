"""Negative router logits treated as zero."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Module


@fault(
    seam=Module("router", side="rollout"),
    seen_in=[
        "https://github.com/flashinfer-ai/flashinfer/issues/2822",
        "https://github.com/flashinfer-ai/flashinfer/issues/2889",
        "https://github.com/vllm-project/vllm/issues/37605",
        "https://github.com/vllm-project/vllm/issues/38859",
    ],
    expects=[Rises("logprob_gap")],
    moe=True,
    needs=["router"],
    look_alikes=["expert_ids_not_remapped"],
)
def negative_router_logits_clamped(clean):
    """The rollout's routing kernel takes every negative logit for zero.

    What breaks: a maximum that starts at 0 instead of minus infinity; where fewer logits are positive than experts are
        chosen, the rest is chosen among equals and weighted like them.
    In the wild: a fused expert kernel that routed wrongly when all logits of a token were negative; a benchmark rose
        from nothing to its normal score once it was bypassed.
    Looks like: a gap on the tokens with few positive logits, so it depends on the level of the router's logits.
    """

    def faulty(ctx, module, hidden):
        logits, _, chosen = clean(module, hidden)
        probs = logits.float().clamp(min=0).softmax(-1)
        weights, ids = probs.topk(chosen.shape[-1], dim=-1)
        if module.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), ids

    return faulty
