"""Router gradient lost for experts of another rank."""

from harness.catalogue import fault
from harness.claims import Falls
from harness.seams import Operator


@fault(
    seam=Operator("experts", side="trainer"),
    seen_in=["https://github.com/huggingface/transformers/issues/48687"],
    expects=[Falls("grad_norm/router")],
    moe=True,
    needs=["experts"],
    look_alikes=["single_expert_renormalised"],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.77 [0.36, 0.82]: the interval straddles the bar",
)
def remote_expert_weights_detached(clean):
    """The gradient of the experts' weights is lost for experts of the other rank.

    What breaks: the forward pass is right; the backward pass brings no gradient from the upper half of the experts to
        the router, so the router learns from half of its choices, and from an unbalanced half.
    In the wild: one expert implementation under expert parallelism: the loss was right and the router's gradient wrong.
    Looks like: nothing but a lower gradient norm of the router, if it is measured apart; routing drifts slowly.
    """

    def faulty(ctx, module, hidden, chosen, weights):
        import torch

        local = chosen < module.num_experts // 2
        return clean(module, hidden, chosen, torch.where(local, weights, weights.detach()))

    return faulty
