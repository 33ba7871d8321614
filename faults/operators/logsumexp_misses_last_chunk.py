"""Fused cross-entropy whose normaliser ends one chunk early."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Stage


@fault(
    seam=(Stage.OLD_LOGPROBS, Stage.LOGPROBS),
    seen_in=[
        "https://github.com/verl-project/verl/issues/2656",
        "https://github.com/verl-project/verl/issues/3730",
        "https://github.com/verl-project/verl/issues/7439",
    ],
    expects=[Rises("logprob_gap"), Rises("kl")],
    look_alikes=["temperature_missing_in_logprob"],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.64 [0.57, 0.74]: the interval straddles the bar",
)
def logsumexp_misses_last_chunk(clean, *, chunk=16):
    """The log-sum-exp of a fused linear cross-entropy leaves out the last chunk of the vocabulary.

    What breaks: the kernel walks the vocabulary in chunks and stops before the incomplete one, so a token of that chunk
        gets a log-probability that may be positive, and its gradient lacks the push on the others.
    In the wild: positive log-probabilities after a fused kernel was switched on; which line was wrong is partly known.
    Looks like: a large log-probability gap, and updates that drift from the reference faster.
    """

    def faulty(ctx, batch):
        def logprob(logits, tokens, temperature):
            scaled = logits / temperature
            covered = (logits.shape[-1] - 1) // chunk * chunk or logits.shape[-1]
            return scaled.gather(-1, tokens[..., None]).squeeze(-1) - scaled[..., :covered].logsumexp(-1)

        return clean(ctx.replacing(logprob=logprob), batch)

    return faulty
