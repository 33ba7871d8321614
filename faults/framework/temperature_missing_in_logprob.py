"""Trainer's log-probabilities taken at temperature 1."""

from harness.catalogue import fault
from harness.claims import Rises, Shifts
from harness.seams import Stage


@fault(
    seam=(Stage.OLD_LOGPROBS, Stage.LOGPROBS),
    seen_in=[
        "https://github.com/huggingface/trl/issues/4159",
        "https://github.com/radixark/miles/issues/68",
    ],
    expects=[Rises("logprob_gap"), Shifts("entropy")],
)
def temperature_missing_in_logprob(clean):
    """The trainer scores tokens at temperature 1, whatever temperature they were sampled at.

    What breaks: the logits are not divided by the temperature before log-probability and entropy are taken.
    In the wild: an inference engine's raw log-probabilities against a trainer's tempered ones; the first token's
        importance ratio was 2 where 0.85 to 1.15 is healthy.
    Looks like: a constant log-probability gap, entropy and gradient norm shifted.
    """

    def faulty(ctx, batch):
        logprob, entropy = ctx.ops.logprob, ctx.ops.entropy
        untempered = ctx.replacing(
            logprob=lambda logits, tokens, temperature: logprob(logits, tokens, 1.0),
            entropy=lambda logits, temperature: entropy(logits, 1.0),
        )
        return clean(untempered, batch)

    return faulty
