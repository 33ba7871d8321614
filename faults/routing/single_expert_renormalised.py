"""Weight of a single chosen expert divided by itself."""

from harness.catalogue import fault
from harness.claims import Falls
from harness.seams import Module


@fault(
    seam=Module("router", side="both"),
    seen_in=["https://github.com/jingyaogong/minimind/issues/859"],
    expects=[Falls("grad_norm/router")],
    moe=True,
    needs=["router"],
    look_alikes=["remote_expert_weights_detached"],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.80 [0.68, 0.87]: the interval straddles the bar",
)
def single_expert_renormalised(clean):
    """One expert is chosen per token and its weight is renormalised to one.

    What breaks: a weight divided by itself is constant, so the router gets no gradient from the loss.
    In the wild: a small model with one expert per token and ``norm_topk_prob``: the gradient into the gate was 1e-9.
    Looks like: the router's gradient norm vanishes; everything else shifts with the lost experts.
    """

    def faulty(ctx, module, hidden):
        logits, weights, chosen = clean(module, hidden)
        first = weights[:, :1]
        return logits, first / first, chosen[:, :1]

    return faulty
