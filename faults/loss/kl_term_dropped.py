"""A KL coefficient that does not arrive."""

from harness.catalogue import fault
from harness.claims import Falls, Zero
from harness.seams import Stage


@fault(
    seam=Stage.LOSS,
    seen_in=[
        "https://github.com/Roblox/FAI-RL/issues/96",
        "https://github.com/huggingface/trl/issues/4040",
        "https://github.com/huggingface/open-r1/issues/704",
    ],
    expects=[Zero("kl"), Falls("loss")],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.74 [0.54, 0.82]: the interval straddles the bar",
)
def kl_term_dropped(clean):
    """The KL term is left out of the loss, and with it from the log.

    What breaks: the coefficient is set in one configuration and never handed to the one that the loss reads.
    In the wild: runs whose KL column was empty and whose policy drifted until it hacked the format reward.
    Looks like: KL zero or missing, the loss lower by the term; the policy leaves its reference, later.
    """

    def faulty(ctx, forward):
        def nothing(logprobs, ref):
            return 0.0 * (logprobs - ref)

        return clean(ctx.replacing(kl=nothing), forward)

    return faulty
