"""Entropy averaged over padding as well."""

from harness.catalogue import fault
from harness.claims import Shifts, Stays
from harness.seams import Probe


@fault(
    seam=Probe("entropy"),
    seen_in=[
        "https://github.com/huggingface/trl/issues/6121",
        "https://github.com/huggingface/trl/issues/2281",
        "https://github.com/allenai/open-instruct/issues/756",
    ],
    expects=[Shifts("entropy"), Stays("loss")],
    expected_verdict="PARTIAL",
    reason="at three seeds the fidelity is 0.55 [0.51, 0.58]: what the two models think at padding is not alike",
)
def entropy_counts_padding(clean):
    """The logged entropy is a mean over all positions, padding included.

    What breaks: the mask is not applied before the mean; what the model thinks at padding counts like a real token.
    In the wild: an entropy that followed the mean response length, and went negative with a sentinel at padding.
    Looks like: the entropy is off from the first step on and follows the lengths; weights and loss are untouched.
    """

    def faulty(ctx, seen):
        import torch

        values = torch.cat([forward.entropy.flatten() for forward in seen.forwards])
        return float(values.double().mean())

    return faulty
