"""Gradient of the routing weights lost for the experts of another rank."""

from harness.catalogue import fault
from harness.claims import Shifts, Stays
from harness.seams import Operator


@fault(
    seam=Operator("experts", side="trainer", direction="backward"),
    seen_in=["https://github.com/huggingface/transformers/issues/48687"],
    expects=[Shifts("grad_norm/router"), Stays("logprob_gap")],
    severity="ranks",
    moe=True,
    needs=["experts", "router"],
    look_alikes=["gating_weights_detached"],
)
def topk_weight_gradient_dropped(clean, *, ranks=2):
    """The gradient of the routing weights is lost for every expert that lies on another rank.

    What breaks: with the experts spread over ``ranks`` processes, the backward pass keeps the gradient of the routing
        weights for the experts of the first and drops it for the others, so the router learns from one share of its
        choices; forward values and all other gradients are right.
    In the wild: an expert-parallel run whose loss was right and whose router gradient was not, reproduced on two
        processes.
    Looks like: nothing but another gradient norm of the router; a slow drift of the routing.
    """

    def faulty(ctx, call, *grads):
        good = clean(call, *grads)
        hidden, weights = good.inputs
        if weights is None:
            return good
        own = call.args[1] * ranks < call.module.num_experts
        return good._replace(inputs=(hidden, weights * own))

    return faulty
