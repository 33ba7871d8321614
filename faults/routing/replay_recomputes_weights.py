"""Routing replayed without its weights."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Module


@fault(
    seam=Module("router", side="trainer"),
    seen_in=["https://github.com/radixark/miles/issues/2722"],
    expects=[Rises("logprob_gap")],
    moe=True,
    needs=["router"],
    look_alikes=["router_logits_bf16", "ep_remote_outputs_in_bf16"],
)
def replay_recomputes_weights(clean):
    """The chosen experts are replayed, but their weights are computed anew from bf16 logits.

    What breaks: the softmax over the replayed experts runs in bf16, so the right experts are mixed in slightly wrong
        proportions.
    In the wild: replay of expert numbers alone cut the mean log-probability error to about a third, not to zero.
    Looks like: a small, even log-probability gap without the heavy tail of wrong experts.
    """

    def faulty(ctx, module, hidden):
        logits, weights, chosen = clean(module, hidden)
        weights = logits.bfloat16().softmax(-1).gather(-1, chosen)
        if module.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen

    return faulty
