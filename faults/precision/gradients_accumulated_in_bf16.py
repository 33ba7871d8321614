"""Micro-batch gradients summed in a half type."""

from harness.catalogue import fault
from harness.claims import Scatters
from harness.seams import Stage


@fault(
    seam=Stage.BACKWARD,
    seen_in=[
        "https://github.com/deepspeedai/DeepSpeed/issues/1800",
        "https://github.com/deepspeedai/DeepSpeed/issues/2768",
        "https://github.com/modelscope/ms-swift/pull/10102",
    ],
    expects=[Scatters("grad_norm")],
)
def gradients_accumulated_in_bf16(clean):
    """The buffer in which gradients of micro-batches are summed holds bf16.

    What breaks: after every micro-batch the sum is rounded to 8 bits, so small contributions to a large sum are lost.
    In the wild: a flag that asked for fp32 accumulation and was not handed on to the gradient buffers.
    Looks like: loss and ratio as healthy at first; gradient norms differ a little in every step, up or down.
    """

    def faulty(ctx, scaled):
        import torch

        clean(ctx, scaled)
        for parameter in ctx.trainer.model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.to(torch.bfloat16))

    return faulty
