"""Gradient norm taken in fp32."""

from harness.catalogue import remedy
from harness.seams import Stage


@remedy(
    seam=Stage.CLIP,
    for_=["grad_overflow"],
    seen_in=["https://github.com/facebookresearch/fairscale/issues/263"],
)
def fp32_grad_norm(clean):
    """The norm is the root of a sum of squares in fp32, and gradients are clipped by that one.

    What it does: casts before squaring, so that the sum cannot overflow where the gradients did not.
    In the wild: the fix of the report; every trainer that measures in the gradients' own precision needs it.
    What it costs: a copy of each gradient tensor in fp32 while it is squared.
    """

    def measured(ctx, grads):
        import torch

        tensors = list(grads.named.values())
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)))
        if ctx.rl.max_grad_norm > 0:
            torch._foreach_mul_(tensors, (ctx.rl.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        return grads.with_(norm=float(norm))

    return measured
