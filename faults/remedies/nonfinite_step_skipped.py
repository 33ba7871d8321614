"""Optimiser step skipped where a gradient is not finite."""

from harness.catalogue import remedy
from harness.seams import Stage


@remedy(
    seam=Stage.STEP,
    for_=[],
    seen_in=[
        "https://github.com/verl-project/verl/issues/1506",
        "https://github.com/radixark/miles/pull/2078",
    ],
)
def nonfinite_step_skipped(clean):
    """A step with a NaN or an infinity in any gradient is dropped, whatever norm was reported.

    What it does: keeps the weights finite, so that one bad batch costs one step and not the run.
    In the wild: trainers look at the norm; that does not help where the norm itself is wrong, or nobody looks at it.
    What it costs: nothing is learnt for as long as every step has a bad gradient: NaN becomes a standstill.
    """

    def guarded(ctx, grads):
        import torch

        finite = torch.stack([g.isfinite().all() for g in grads.named.values()]).all()
        return clean(ctx, grads) if finite else ctx.skipped_step()

    return guarded
