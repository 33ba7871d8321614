"""Left padding attended to in the scoring pass."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Stage


@fault(
    seam=Stage.OLD_LOGPROBS,
    seen_in=[
        "https://github.com/huggingface/trl/issues/2708",
        "https://github.com/unslothai/unsloth/issues/3176",
        "https://github.com/unslothai/unsloth/issues/6738",
    ],
    expects=[Rises("logprob_gap"), Rises("ratio_max")],
    look_alikes=["logprobs_shifted_by_one"],
)
def mask_omitted_in_scoring(clean):
    """Old and reference log-probabilities are computed without the attention mask.

    What breaks: prompts are padded on the left; without the mask real tokens attend to padding and sit at other
        positions. The pass with gradient has the mask.
    In the wild: a scoring call that took token ids only; differences of nats to the unpadded score.
    Looks like: a log-probability gap that depends on the padding of a prompt, ratios off one, a floor under KL.
    """

    def faulty(ctx, batch):
        import torch

        unmasked = batch.with_(attention_mask=torch.ones_like(batch.attention_mask))
        return clean(ctx, unmasked).with_(attention_mask=batch.attention_mask)

    return faulty
