"""Rollout weights rounded where the trainer's are not."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Stage


@fault(
    seam=Stage.SYNC,
    seen_in=[
        "https://github.com/OpenRLHF/OpenRLHF/issues/1155",
        "https://github.com/sail-sg/Precision-RL/issues/10",
        "https://github.com/verl-project/verl/issues/3597",
    ],
    expects=[Rises("logprob_gap")],
    look_alikes=["expert_sums_reduced_in_bf16", "rollout_logprob_precision"],
)
def rollout_weights_in_bf16(clean, *, dtype="bfloat16"):
    """The sync hands weights over in a half type while the trainer keeps fp32.

    What breaks: each weight of the rollout is off by up to half a rounding unit, and small updates do not arrive until
        they add up to one.
    In the wild: the gap between sampling and training in bf16, which a paper's runs saw grow until they collapsed, and
        which fp16, with three more bits, reduces.
    Looks like: a small log-probability gap one step after onset that stays.
    """

    def faulty(ctx, update):
        import torch

        clean(ctx, update)
        for weight in ctx.rollout.model.parameters():
            weight.copy_(weight.to(getattr(torch, dtype)))

    return faulty
