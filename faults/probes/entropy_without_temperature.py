"""Entropy of the untempered distribution."""

from harness.catalogue import fault
from harness.claims import Shifts, Stays
from harness.seams import Stage


@fault(
    seam=Stage.LOGPROBS,
    seen_in=[
        "https://github.com/OpenRLHF/OpenRLHF/issues/1319",
    ],
    expects=[Shifts("entropy"), Stays("loss")],
)
def entropy_without_temperature(clean):
    """The entropy is that of the raw logits, while the policy samples at a temperature.

    What breaks: the temperature divides the logits for the log-probabilities and is forgotten for the entropy.
    In the wild: entropies up to a nat away from those of the policy that was sampled.
    Looks like: the entropy is off by a constant; as a metric only, nothing else changes.
    """

    def faulty(ctx, batch):
        entropy = ctx.ops.entropy

        def untempered(logits, temperature):
            return entropy(logits, 1.0)

        return clean(ctx.replacing(entropy=untempered), batch)

    return faulty
