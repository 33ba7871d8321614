"""The clip norm leaves the experts out."""

from harness.catalogue import fault
from harness.claims import Scatters, Stays
from harness.seams import Stage


@fault(
    seam=Stage.CLIP,
    seen_in=[
        "https://github.com/NVIDIA/Megatron-LM/issues/5916",
        "https://github.com/deepspeedai/DeepSpeed/issues/8478",
        "https://github.com/laekov/fastmoe/issues/169",
    ],
    expects=[Scatters("grad_norm"), Stays("logprob_gap")],
    moe=True,
    needs=["experts"],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.58 [0.51, 0.72]: the interval straddles the bar",
)
def clip_norm_misses_experts(clean):
    """The global norm is taken over the dense parameters only, and clipping goes by it.

    What breaks: experts live in groups of their own and are missed by the sum of squares, so clipping is too weak.
    In the wild: a norm of 7.2 for gradients whose norm is 11.0, in one report.
    Looks like: the logged norm misses the experts' share, a few percent where dense weights dominate it; steps that
        should have been clipped harder go further, and the norms that follow scatter.
    """

    def faulty(ctx, grads):
        experts = set(ctx.trainer.parameter_groups()["experts"])
        dense = {name: grad for name, grad in grads.named.items() if name not in experts}
        before = {name: grad.clone() for name, grad in dense.items()}
        seen = clean(ctx, grads.with_(named=dense))
        name = max(dense, key=lambda n: float(before[n].abs().max()))
        peak = before[name].abs().argmax()
        largest = before[name].flatten()[peak]
        factor = dense[name].flatten()[peak] / largest if largest else 1.0
        for other in experts & set(grads.named):
            grads.named[other].mul_(factor)
        return grads.with_(norm=seen.norm)

    return faulty
