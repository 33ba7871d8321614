"""Log-ratio clamped before the KL estimator exponentiates it."""

from harness.catalogue import remedy
from harness.seams import Stage


@remedy(
    seam=Stage.LOSS,
    for_=[],
    seen_in=[
        "https://github.com/OpenRLHF/OpenRLHF/pull/1160",
        "https://github.com/OpenRLHF/OpenRLHF/pull/1335",
        "https://github.com/verl-project/verl/issues/891",
    ],
)
def kl_log_ratio_clamped(clean, *, bound=10.0):
    """The difference of log-probabilities goes into the KL estimator clamped to [-bound, bound].

    What it does: k3 exponentiates the difference; clamped first, neither its value nor its gradient can overflow. A
        clamp of the result alone leaves a gradient of 0 times infinity.
    In the wild: bounds of 10 and 20 are in use.
    What it costs: beyond the bound the term has no gradient, so it no longer holds back a token that has run away.
    """

    def bounded(ctx, forward):
        kl = ctx.ops.kl

        def clamped(logprobs, ref):
            return kl((logprobs - ref).clamp(-bound, bound), 0.0 * ref.nan_to_num())

        return clean(ctx.replacing(kl=clamped), forward)

    return bounded
