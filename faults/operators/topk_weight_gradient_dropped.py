"""Half of the router's gradient lost in the experts' backward pass."""

from harness.catalogue import fault
from harness.claims import Shifts, Stays
from harness.seams import Operator


@fault(
    seam=Operator("experts", side="trainer", direction="backward"),
    seen_in=["https://github.com/huggingface/transformers/issues/48687"],
    expects=[Shifts("grad_norm/router"), Stays("logprob_gap")],
    severity="share",
    moe=True,
    needs=["experts", "router"],
    look_alikes=["gating_weights_detached"],
)
def topk_weight_gradient_dropped(clean, *, share=0.5):
    """The gradient of the routing weights is lost for a share of each token's experts.

    What breaks: the experts' backward pass gives no gradient to the weights of some of the chosen experts, so the
        router learns from the others alone; forward values and all other gradients are right.
    In the wild: an expert-parallel run in which every rank kept the gradient of its own experts' weights only.
    Looks like: nothing but another gradient norm of the router; a slow drift of the routing.
    """

    def faulty(ctx, call, *grads):
        good = clean(call, *grads)
        hidden, weights = good.inputs
        if weights is None:
            return good
        kept = weights.clone()
        kept[:, : round(share * weights.shape[1])] = 0
        return good._replace(inputs=(hidden, kept))

    return faulty
