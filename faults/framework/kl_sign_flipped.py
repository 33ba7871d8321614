"""KL term subtracted instead of added."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Stage


@fault(
    seam=Stage.LOSS,
    seen_in=[
        "https://github.com/qiancheng0/ToolRL/issues/52",
        "https://github.com/mll-lab-nu/RAGEN/issues/58",
    ],
    expects=[Rises("kl")],
    expected_verdict="INCONCLUSIVE",
    reason="0.80 [0.68, 0.91] at 8 seeds, 0.80 [0.69, 0.90] at 12: KL grows exponentially in both models, from step 14 "
    "in the original and 12 in the proxy, and the seeds of one model explode at different times",
)
def kl_sign_flipped(clean):
    """The KL term is subtracted from the loss instead of added, so that divergence is rewarded.

    What breaks: the sign of the penalty in the policy loss.
    In the wild: two agent-training frameworks built on one trainer inherited it; runs became unstable and collapsed.
    Looks like: KL grows faster and faster, entropy and the gradient norm follow, the reward falls.
    """

    def faulty(ctx, forward):
        kl = ctx.ops.kl
        result = clean(ctx.replacing(kl=lambda logprobs, ref: -kl(logprobs, ref)), forward)
        return _report_true_kl(result)

    def _report_true_kl(result):
        from dataclasses import replace

        return replace(result, terms={**result.terms, "kl": -result.terms["kl"]}) if "kl" in result.terms else result

    return faulty
