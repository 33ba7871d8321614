"""A KL estimate whose gradient is not that of the KL."""

from harness.catalogue import fault
from harness.claims import Falls, Scatters
from harness.seams import Stage


@fault(
    seam=Stage.LOSS,
    seen_in=[
        "https://github.com/NVIDIA-NeMo/RL/issues/2506",
        "https://github.com/allenai/open-instruct/pull/535",
        "https://github.com/allenai/open-instruct/issues/534",
    ],
    expects=[Falls("kl"), Scatters("grad_norm")],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.74 [0.53, 0.79]: the interval straddles the bar",
)
def kl_k1_backpropagated(clean):
    """The sampled difference of log-probabilities is differentiated as if it were the KL divergence.

    What breaks: the mean of log p - log q over samples of p is the KL, but its gradient without a score term is zero in
        expectation: the term pushes every sampled token down and holds nothing near the reference.
    In the wild: trainers that let the user choose the estimator and differentiated all of them alike.
    Looks like: the KL estimate falls below zero and goes on falling, gradient norms differ, nothing holds the policy.
    """

    def faulty(ctx, forward):
        def difference(logprobs, ref):
            return logprobs - ref

        return clean(ctx.replacing(kl=difference), forward)

    return faulty
