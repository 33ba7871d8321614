"""Attention backward that now and then returns NaN."""

from harness.catalogue import fault
from harness.claims import NonFinite, Scatters
from harness.seams import Operator


@fault(
    seam=Operator("attention", side="trainer", direction="backward"),
    seen_in=[
        "https://github.com/Dao-AILab/flash-attention/issues/41",
        "https://github.com/MinghuasLab/flash-attention-npu/issues/44",
        "https://github.com/MinghuasLab/flash-attention-npu/issues/77",
    ],
    expects=[NonFinite("grad_norm"), Scatters("skipped_steps")],
    severity="rate",
    look_alikes=["grad_overflow"],
)
def attention_backward_nan(clean, *, rate=0.25):
    """In some steps the fused attention's backward pass returns NaN in the gradient of one head's queries.

    What breaks: one head of one sequence gets a gradient of NaN, which reaches every weight below it; ``rate`` is the
        probability per step. Loss and forward values are right.
    In the wild: backward kernels that are not deterministic, NaN after a hundred rounds and not again after a restart.
    Looks like: the gradient norm is NaN for single steps, which are skipped, and normal in between.
    """
    hit = {}

    def faulty(ctx, call, *grads):
        import torch

        good = clean(call, *grads)
        if ctx.step not in hit:
            hit.clear()
            hit[ctx.step] = float(torch.rand((), generator=ctx.rng("attention"))) < rate
        query = good.inputs[0].clone()
        if hit[ctx.step]:
            query[0, 0] = torch.nan
        return good._replace(inputs=(query, *good.inputs[1:]))

    return faulty
