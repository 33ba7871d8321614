"""Gradients of experts scaled by the number of ranks."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Stage


@fault(
    seam=Stage.REDUCE,
    seen_in=[
        "https://github.com/deepspeedai/DeepSpeed/issues/5259",
        "https://github.com/pytorch/pytorch/issues/160285",
        "https://github.com/NVIDIA/Megatron-LM/issues/7160",
    ],
    expects=[Rises("grad_norm/experts")],
    severity="ranks",
    moe=True,
    needs=["experts"],
)
def expert_gradients_scaled(clean, *, ranks=2.0):
    """The gradients of the experts are multiplied by the expert-parallel size, those of the rest are not.

    What breaks: experts are averaged over fewer ranks than dense weights; with the wrong divisor they count too much.
    In the wild: a silent gap in convergence; after the fix the norm was back inside its band.
    Looks like: the norm of the experts' group is up by a constant factor in the first update, the other groups are not.
    """

    def faulty(ctx, mini):
        grads = clean(ctx, mini)
        for name in ctx.trainer.parameter_groups()["experts"]:
            if name in grads.named:
                grads.named[name].mul_(ranks)
        return grads

    return faulty
