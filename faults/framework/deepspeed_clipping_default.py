"""Gradient clipping left at DeepSpeed's default."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Config


@fault(
    seam=Config("deepspeed", key="gradient_clipping"),
    seen_in=["https://github.com/deepspeedai/DeepSpeed/pull/8068"],
    expects=[Rises("update_norm")],
    engine="deepspeed",
)
def deepspeed_clipping_default(clean):
    """The DeepSpeed configuration does not say how to clip, and the default of the installed version decides.

    What breaks: without the key ``gradient_clipping`` versions before 0.19.3 did not clip; since then they clip at 1.0,
        whatever the run was tuned for.
    In the wild: an upgrade, or a lost line, changes the updates of a run, and nothing says so.
    Looks like: the first gradient norm is the same (it is measured before clipping); a run that clipped tighter moves
        further in every step, as far as the optimiser's epsilon lets Adam feel the size of a gradient.
    """

    def faulty(config):
        return {key: value for key, value in config.items() if key != "gradient_clipping"}

    return faulty
