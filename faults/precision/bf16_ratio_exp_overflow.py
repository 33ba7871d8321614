"""Importance ratio exponentiated in bf16 from an unclamped log-ratio."""

from harness.catalogue import fault
from harness.claims import NonFinite
from harness.seams import Stage


@fault(
    seam=Stage.LOSS,
    seen_in=[
        "https://github.com/OpenRLHF/OpenRLHF/issues/931",
        "https://github.com/verl-project/verl/issues/1066",
        "https://github.com/verl-project/verl/issues/1581",
    ],
    expects=[NonFinite("loss"), NonFinite("ratio_max")],
    severity="gap",
    threshold=True,
    look_alikes=["temperature_missing_in_logprob"],
)
def bf16_ratio_exp_overflow(clean, *, gap=96.0):
    """The importance ratio overflows: an unclamped log-ratio is exponentiated in bf16.

    What breaks: log-probabilities are rounded to bf16 and their difference goes into exp without a clamp. bf16 has
        the exponent range of fp32, so it overflows where fp32 does, at a log-ratio of 88.7 (fp16: 11.1); but with 8
        bits of precision a large log-probability is already wrong by half a nat, and the nearest step below the
        limit is e^88.5. One token of each sequence that the rollout found ``gap`` nats less likely trips it.
    In the wild: importance ratios up to 5e8 at negative advantage, where the one-sided clip does not bound the loss.
    Looks like: ratio_max and loss become infinite, then NaN; the update is skipped, or the weights are NaN for good.
    """

    def faulty(ctx, forward):
        import torch

        def ratio(logprobs, old, mask):
            planted = torch.zeros_like(old)
            planted[:, 0] = gap
            log_ratio = logprobs.bfloat16() - (old - planted).bfloat16()
            return (log_ratio * mask.bfloat16()).exp().float()

        return clean(ctx.replacing(ratio=ratio), forward)

    return faulty
