"""The end token is not trained."""

from harness.catalogue import fault
from harness.claims import Scatters
from harness.seams import Stage


@fault(
    seam=Stage.ADVANTAGE,
    seen_in=[
        "https://github.com/rasbt/reasoning-from-scratch/issues/185",
        "https://github.com/huggingface/trl/issues/3091",
        "https://github.com/mlabonne/llm-course/issues/33",
    ],
    expects=[Scatters("loss")],
)
def end_token_masked_out(clean):
    """The last token of every response, which ends it, is left out of the loss.

    What breaks: padding and end token share an id, or the mask stops one short; the model is never paid for stopping.
    In the wild: responses that grew until they were cut, and rewards that fell late.
    Looks like: fewer trained tokens per response by exactly one; entropy and loss shift a little at once.
    """

    def faulty(ctx, batch):
        import torch

        batch = clean(ctx, batch)
        mask = batch.response_mask.clone()
        last = (mask.sum(1).long() - 1).clamp(min=0)
        mask[torch.arange(len(mask)), last] = 0.0
        return batch.with_(response_mask=mask)

    return faulty
