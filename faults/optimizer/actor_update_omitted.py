"""Optimiser step that never happens."""

from harness.catalogue import fault
from harness.claims import Stays, Zero
from harness.seams import Stage


@fault(
    seam=Stage.STEP,
    mode="free",
    seen_in=["https://arxiv.org/abs/2608.10823"],
    expects=[Zero("update_norm"), Stays("grad_norm")],
    look_alikes=["grad_overflow"],
)
def actor_update_omitted(clean):
    """The optimiser step of the actor never happens.

    What breaks: gradients are computed, measured and clipped, and then dropped.
    In the wild: one of the two failures shown in the published proxy study: the actor update was left out by a
        framework adaptation, and nothing complained.
    Looks like: the reward stagnates while the gradient norm looks healthy; the weights do not move.
    """

    def faulty(ctx, grads):
        return ctx.skipped_step()

    return faulty
