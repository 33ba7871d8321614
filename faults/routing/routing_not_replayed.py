"""Trainer and rollout choosing experts apart."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Module


@fault(
    seam=Module("router", side="trainer"),
    seen_in=[
        "https://github.com/NVIDIA/Megatron-LM/issues/4256",
        "https://github.com/NVIDIA-NeMo/RL/issues/2590",
        "https://github.com/NVIDIA-NeMo/RL/issues/1441",
        "https://github.com/areal-project/AReaL/issues/1496",
    ],
    expects=[Rises("logprob_gap")],
    severity="noise",
    moe=True,
    needs=["router"],
    look_alikes=["router_logits_bf16", "router_splitk_noise"],
)
def routing_not_replayed(clean, *, noise=0.1):
    """The trainer chooses experts by itself, by logits that differ a little from the rollout's.

    What breaks: each side's kernels give each expert's logit another error, here a normal deviate of size ``noise`` per
        expert and step; near ties fall differently. The weights of the chosen experts carry no error.
    In the wild: without replay of the rollout's choices about one router in ten disagreed, and nearly every token met
        at least one of them.
    Looks like: a log-probability gap with a heavy tail; ratios stay near 1, since the trainer agrees with itself.
    """

    def faulty(ctx, module, hidden):
        import torch

        logits, weights, chosen = clean(module, hidden)
        error = noise * torch.randn(logits.shape[-1], generator=ctx.rng("engine_difference"))
        ids = (logits + error.to(logits)).topk(chosen.shape[-1], dim=-1).indices
        weights = logits.float().softmax(-1).gather(-1, ids)
        if module.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), ids

    return faulty
