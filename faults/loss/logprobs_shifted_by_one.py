"""Old log-probabilities belong to the neighbouring token."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Stage


@fault(
    seam=Stage.OLD_LOGPROBS,
    seen_in=[
        "https://github.com/PrimeIntellect-ai/prime-rl/issues/1525",
        "https://github.com/huggingface/trl/issues/5620",
    ],
    expects=[Rises("logprob_gap"), Rises("ratio_max")],
)
def logprobs_shifted_by_one(clean):
    """The log-probabilities that the ratio is taken against are those of the token before.

    What breaks: logits predict the next token; without the shift by one, position t is compared with position t - 1.
    In the wild: an offset between the trainer's and the inference engine's arrays, found in review.
    Looks like: a gap of nats, ratios far from one in the first update, nothing is learned.
    """

    def faulty(ctx, batch):
        batch = clean(ctx, batch)
        return batch.with_(old_logprobs=batch.old_logprobs.roll(1, dims=1))

    return faulty
