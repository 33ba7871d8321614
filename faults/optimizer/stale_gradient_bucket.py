"""Some gradients are those of the update before."""

from harness.catalogue import fault
from harness.claims import Scatters
from harness.seams import Stage


@fault(
    seam=Stage.REDUCE,
    seen_in=[
        "https://github.com/deepspeedai/DeepSpeed/issues/7965",
        "https://github.com/deepspeedai/DeepSpeed/issues/8061",
        "https://github.com/hiyouga/LlamaFactory/issues/5627",
    ],
    expects=[Scatters("grad_norm")],
    severity="share",
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.82 [0.67, 0.87]: the interval straddles the bar",
)
def stale_gradient_bucket(clean, *, share=0.5):
    """A share of the gradient buckets is reduced before this update's gradients were written into it.

    What breaks: communication overlaps with the backward pass without waiting for it, so a bucket still holds what the
        update before had left there.
    In the wild: two runs of one script with gradient norms of 59 and 44; a norm of exactly the square root of two.
    Looks like: the loss of the first update is right, gradient norms are noisy and updates less useful.
    """
    before = {}

    def faulty(ctx, mini):
        import torch

        grads = clean(ctx, mini)
        names = sorted(grads.named)
        late = torch.rand(len(names), generator=ctx.rng("buckets")) < share
        for name, is_late in zip(names, late.tolist(), strict=True):
            fresh = grads.named[name].clone()
            if is_late and name in before:
                grads.named[name].copy_(before[name])
            before[name] = fresh
        return grads

    return faulty
