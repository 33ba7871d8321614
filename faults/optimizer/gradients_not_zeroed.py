"""Gradients carried over into the next step."""

from harness.catalogue import fault
from harness.claims import Rises, Scatters
from harness.seams import Stage


@fault(
    seam=Stage.STEP,
    seen_in=[
        "https://github.com/deepspeedai/DeepSpeed/issues/7837",
        "https://github.com/deepspeedai/DeepSpeed/pull/7839",
        "https://github.com/modelscope/ms-swift/issues/6815",
    ],
    expects=[Scatters("grad_norm"), Rises("update_norm")],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.69 [0.62, 0.73]: the interval straddles the bar",
)
def gradients_not_zeroed(clean):
    """The gradients of a step are not cleared, so those of the next one are added to them.

    What breaks: the optimiser sees the sum of all gradients since the fault woke, not the current one.
    In the wild: an engine stage that skipped zeroing for one combination of precision and partitioning.
    Looks like: the gradient norm scatters, mostly upwards, and updates get larger; loss and entropy still look normal.
    """

    def faulty(ctx, grads):
        kept = {name: grad.clone() for name, grad in grads.named.items()}
        update = clean(ctx, grads)
        for name, parameter in ctx.trainer.model.named_parameters():
            if name in kept:
                parameter.grad = kept[name]
        return update

    return faulty
