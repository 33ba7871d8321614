"""The logged gradient norm is that of one shard."""

from harness.catalogue import fault
from harness.claims import Falls, Stays
from harness.seams import Probe


@fault(
    seam=Probe("grad_norm"),
    seen_in=[
        "https://github.com/modelscope/ms-swift/issues/8341",
    ],
    expects=[Falls("grad_norm"), Stays("loss")],
    severity="ranks",
)
def grad_norm_of_one_shard(clean, *, ranks=8.0):
    """The gradient norm that is logged covers one rank's share of the parameters.

    What breaks: the squares are not summed over ranks before the root is taken. Clipping uses the right norm.
    In the wild: norms that could not be compared between partitioning stages of one engine.
    Looks like: the norm is lower from the first step on; norms by group, loss and weights are untouched.
    """

    def faulty(ctx, seen):
        norm = clean(seen)
        return None if norm is None else norm / ranks**0.5

    return faulty
