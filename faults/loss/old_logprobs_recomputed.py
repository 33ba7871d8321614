"""Old log-probabilities overwritten by the current ones."""

from harness.catalogue import fault
from harness.claims import Falls, Flat
from harness.seams import Stage


@fault(
    seam=Stage.LOSS,
    seen_in=[
        "https://github.com/GMISWE/tinker-cloud/issues/66",
    ],
    expects=[Falls("ratio_max"), Flat("ratio_mean")],
    look_alikes=["ratio_without_gradient"],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.78 [0.68, 0.83]: the interval straddles the bar",
)
def old_logprobs_recomputed(clean):
    """Every mini-batch takes its ratio against log-probabilities of the weights that it is about to change.

    What breaks: the sampled log-probabilities are overwritten by a recompute, so the ratio is one in every mini-batch
        and neither clipping nor correction of old data has anything to do.
    In the wild: a server that scored every mini-batch anew and put the result where the old scores belonged.
    Looks like: ratio one, clip fraction zero, although the batch is reused; loss and gradient norm look healthy.
    """

    def faulty(ctx, forward):
        import dataclasses

        batch = forward.batch.with_(old_logprobs=forward.logprobs.detach())
        return clean(ctx, dataclasses.replace(forward, batch=batch))

    return faulty
