"""An importance ratio that is constant."""

from harness.catalogue import fault
from harness.claims import Falls, Flat
from harness.seams import Stage


@fault(
    seam=Stage.LOSS,
    seen_in=[
        "https://github.com/Goekdeniz-Guelmez/mlx-lm-lora/issues/55",
        "https://github.com/Goekdeniz-Guelmez/mlx-lm-lora/issues/49",
    ],
    expects=[Falls("grad_norm"), Flat("ratio_max")],
    look_alikes=["old_logprobs_recomputed"],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.79 [0.68, 0.86]: the interval straddles the bar",
)
def ratio_without_gradient(clean):
    """The importance ratio is the constant one, so the policy gradient is zero.

    What breaks: an option that names no level of the ratio leaves a ratio without gradient; only the KL term teaches.
    In the wild: a default value under which an adapter's weights stayed at zero while rewards looked plausible.
    Looks like: the loss looks normal, no token is ever clipped, and the gradient norm is that of the KL term alone.
    """

    def faulty(ctx, forward):
        def constant(logprobs, old, mask):
            return (0.0 * logprobs).exp()

        return clean(ctx.replacing(ratio=constant), forward)

    return faulty
