"""Overflow that saturates in silence."""

from harness.catalogue import fault
from harness.claims import Rises, Stays
from harness.seams import Operator


@fault(
    seam=Operator("npu_grouped_matmul", side="trainer"),
    seen_in=[
        "https://github.com/DeepLink-org/deeplink.framework/pull/684",
        "https://github.com/DeepLink-org/DIOPI/pull/644",
    ],
    expects=[Rises("logprob_gap"), Stays("skipped_steps")],
    severity="magnitude",
    moe=True,
    needs=["experts"],
    look_alikes=["grad_overflow"],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.84 [0.68, 0.90]: the interval straddles the bar",
)
def saturation_hides_overflow(clean, *, magnitude=65536.0, mode="saturation"):
    """The device is in saturation mode: what overflows becomes the largest number, NaN becomes 0, no detector sees it.

    What breaks: the experts' matrix products leave fp16 (largest number 65504) and are clamped there, so large
        activations are wrong and finite, and checks for infinity and NaN have nothing to find. ``magnitude`` stands for
        how much larger the activations of a large model are. ``mode=inf_nan`` is the same overflow by IEEE 754.
    In the wild: the only mode of first-generation Ascend training cards and an option of later ones
        (``INF_NAN_MODE_ENABLE=0``); loss scalers that never saw an overflow until the mode was changed.
    Looks like: log-probabilities off, no step skipped; in ``inf_nan`` mode the loss is NaN and every step is skipped.
    """

    def faulty(ctx, *args, **kwargs):
        import torch

        (y,) = clean(*args, **kwargs)
        large = y * magnitude
        if mode == "saturation":
            top = torch.finfo(torch.float16).max
            large = torch.nan_to_num(large, nan=0.0, posinf=top, neginf=-top).clamp(-top, top)
        return [large.half().to(y.dtype) / magnitude]

    return faulty
