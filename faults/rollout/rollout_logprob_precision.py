"""Scaling factor of the rollout's log-probabilities at low precision."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Stage


@fault(
    seam=(Stage.ROLLOUT, Stage.ROLLOUT_LOGPROBS),
    seen_in=["https://arxiv.org/abs/2608.10823"],
    expects=[Rises("logprob_gap")],
    look_alikes=["stale_rollout_weights", "router_logits_bf16"],
)
def rollout_logprob_precision(clean, *, dtype="bfloat16"):
    """The rollout scales its logits at low precision before it takes log-probabilities.

    What breaks: logits are multiplied by the inverse temperature in a half type, so every log-probability that the
        rollout records carries the rounding of its logits; the tokens are sampled as before.
    In the wild: one of the two failures shown in the published proxy study, on Ascend accelerators.
    Looks like: the gap between the rollout's and the trainer's log-probabilities rises and stays up.
    """

    def faulty(ctx, batch):
        import torch

        low, exact = getattr(torch, dtype), ctx.ops.logprob

        def logprob(logits, tokens, temperature):
            scale = torch.tensor(1.0 / temperature, dtype=low)
            return exact((logits.to(low) * scale).float(), tokens, 1.0)

        return clean(ctx.replacing(logprob=logprob), batch)

    return faulty
