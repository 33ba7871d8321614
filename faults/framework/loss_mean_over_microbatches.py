"""Average of micro-batch means in place of one mean."""

from harness.catalogue import fault
from harness.claims import Scatters
from harness.seams import Stage


@fault(
    seam=Stage.LOSS,
    seen_in=[
        "https://github.com/verl-project/verl/issues/5625",
        "https://github.com/agentscope-ai/Trinity-RFT/issues/336",
        "https://github.com/huggingface/transformers/issues/24725",
        "https://github.com/NVIDIA/Megatron-LM/issues/4590",
    ],
    expects=[Scatters("loss"), Scatters("grad_norm")],
)
def loss_mean_over_microbatches(clean):
    """Each micro-batch is normalised by its own token count, and the means are averaged.

    What breaks: a token in a micro-batch of short responses weighs more than one in a micro-batch of long ones, so the
        loss depends on how the mini-batch was split.
    In the wild: several trainers, each fixed by one token count for the whole mini-batch.
    Looks like: loss and gradient norm differ a little at every step, up or down with the lengths of the responses.
    """

    def faulty(ctx, forward):
        aggregate = ctx.ops.aggregate

        def local(values, batch):
            own = batch.with_(loss_tokens=float(batch.response_mask.sum()) * batch.loss_sequences / len(batch))
            return aggregate(values, own)

        return clean(ctx.replacing(aggregate=local), forward)

    return faulty
