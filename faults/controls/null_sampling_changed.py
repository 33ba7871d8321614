"""Null arm of free mode: another sampling stream."""

from harness.catalogue import fault
from harness.seams import Stage


@fault(seam=Stage.ROLLOUT, mode="free", seen_in=[], expects=[], control=True)
def null_sampling_changed(clean, *, draw: int = 0):
    """Samples with other random numbers from onset: how far do two healthy runs drift apart?

    What breaks: nothing; it is the run that another random seed of the sampler would have given.
    In the wild: every healthy run.
    Looks like: the noise of sampling. Another ``draw`` samples anew.
    """

    def faulty(ctx, batch):
        return clean(ctx.salted(f"/null{draw}" if draw else "/null"), batch)

    return faulty
