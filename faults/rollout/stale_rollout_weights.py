"""Weights not handed to the rollout."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Stage


@fault(
    seam=Stage.SYNC,
    seen_in=[
        "https://github.com/huggingface/trl/issues/5312",
        "https://github.com/huggingface/trl/issues/5313",
        "https://github.com/huggingface/trl/issues/3679",
    ],
    expects=[Rises("logprob_gap")],
    look_alikes=["rollout_logprob_precision"],
)
def stale_rollout_weights(clean):
    """The rollout keeps the weights it had: the trainer's are no longer handed over.

    What breaks: the sync at the end of the step does nothing, so the rollout falls behind by one more update per step.
    In the wild: an inference engine that dropped its weights while asleep and woke with the old ones.
    Looks like: the log-probability gap jumps at the first update and grows with every step; the reward flattens.
    """

    def faulty(ctx, update):
        return None

    return faulty
