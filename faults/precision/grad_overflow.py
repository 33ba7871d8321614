"""Gradient norm accumulated in fp16."""

from harness.catalogue import fault
from harness.claims import NonFinite, Rises
from harness.seams import Stage


@fault(
    seam=Stage.CLIP,
    seen_in=["https://github.com/facebookresearch/fairscale/issues/263"],
    expects=[NonFinite("grad_norm"), Rises("skipped_steps")],
    severity="multiplier",
    threshold=True,
    look_alikes=["actor_update_omitted"],
)
def grad_overflow(clean, *, multiplier=65536.0):
    """The gradient norm overflows because its sum of squares is accumulated in fp16.

    What breaks: every tensor's norm is squared and summed in fp16, whose largest number is 65504, so any partial norm
        above 256 gives infinity although every gradient is finite. The step is then skipped, or its clip factor is 0.
    In the wild: a per-device norm near 5000, squared in the gradients' own precision; fixed by a cast to fp32 before
        squaring. ``multiplier`` stands for what makes gradients large: the size of the model, or a loss scale that was
        not divided out; its default is the usual initial loss scale of 2^16.
    Looks like: the loss is normal at the step, grad_norm is inf, no weight moves any more, entropy and KL freeze.
    """

    def faulty(ctx, grads):
        import torch

        squares = [(g * multiplier).half().square().sum() for g in grads.named.values()]
        norm = torch.stack(squares).sum().sqrt().float() / multiplier
        if norm.isfinite():
            return clean(ctx, grads)
        factor = ctx.rl.max_grad_norm / (norm + 1e-6)
        torch._foreach_mul_(list(grads.named.values()), factor)
        return grads.with_(norm=float(norm))

    return faulty
