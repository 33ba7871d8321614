"""Advantages normalised twice."""

from harness.catalogue import fault
from harness.claims import Shifts
from harness.seams import Stage


@fault(
    seam=Stage.ADVANTAGE,
    seen_in=[
        "https://github.com/axon-rl/gem/issues/113",
    ],
    expects=[Shifts("grad_norm")],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.64 [0.30, 0.90]: the interval straddles the bar",
)
def advantages_whitened_again(clean):
    """After the normalisation within groups the advantages are normalised once more over the whole batch.

    What breaks: groups in which all answers earned the same have advantage 0 and pull the common deviation down, so all
        other advantages are stretched by a factor that depends on how many such groups there are.
    In the wild: two normalisations in one pipeline, with samples thrown away in between.
    Looks like: gradient norm and loss scaled by a factor that changes from step to step; everything else healthy.
    """

    def faulty(ctx, batch):
        batch = clean(ctx, batch)
        flat = batch.advantages
        return batch.with_(advantages=(flat - flat.mean()) / (flat.std() + 1e-8))

    return faulty
