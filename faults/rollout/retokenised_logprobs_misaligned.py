"""Log-probabilities kept while the response was tokenised again."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Stage


@fault(
    seam=Stage.ROLLOUT_LOGPROBS,
    seen_in=[
        "https://github.com/huggingface/trl/issues/5224",
        "https://github.com/rllm-org/rllm/issues/272",
        "https://github.com/rllm-org/rllm/issues/816",
        "https://github.com/THUDM/slime/issues/117",
    ],
    expects=[Rises("logprob_gap")],
    severity="share",
    look_alikes=["rollout_logprob_precision"],
)
def retokenised_logprobs_misaligned(clean, *, share=0.25):
    """Responses are decoded and encoded again, and log-probabilities no longer belong to their tokens.

    What breaks: encoding may merge two tokens that were sampled apart, so all later log-probabilities sit one place
        off and the last one is filled with 0. It strikes a ``share`` of the responses, each at a random place.
    In the wild: agent loops that hand text rather than token numbers from the engine to the trainer.
    Looks like: a few tokens with a gap of nats among many that agree: the largest gap far above the mean.
    """

    def faulty(ctx, batch):
        import torch

        batch = clean(ctx, batch)
        logprobs, mask = batch.rollout_logprobs, batch.response_mask
        chance, place = torch.rand(2, len(batch), 1, generator=ctx.rng("retokenised"))
        merged = (place * mask.sum(1, keepdim=True)).floor()
        after = (chance < share) & (torch.arange(mask.shape[1]) >= merged)
        shifted = torch.nn.functional.pad(logprobs[:, 1:], (0, 1))
        return batch.with_(rollout_logprobs=torch.where(after, shifted, logprobs) * mask)

    return faulty
