"""Router logits that differ from forward to forward."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Module


@fault(
    seam=Module("router", side="rollout"),
    seen_in=["https://github.com/sgl-project/sglang/issues/40578"],
    expects=[Rises("logprob_gap")],
    severity="relative",
    moe=True,
    needs=["router"],
    look_alikes=["routing_not_replayed", "router_logits_bf16"],
)
def router_splitk_noise(clean, *, relative=0.001953125):
    """The same forward pass of the rollout gives other router logits each time.

    What breaks: partial products of the gate are added in bf16 in no fixed order, so each logit is off by about
        2^-9 of its size, anew in every pass; choices between near-equal experts flip.
    In the wild: two identical requests to one engine on one accelerator generation gave different experts.
    Looks like: a small log-probability gap that is another one when the same rollout is scored again.
    """
    calls = 0

    def faulty(ctx, module, hidden):
        import torch

        nonlocal calls
        calls += 1
        logits, weights, chosen = clean(module, hidden)
        noise = torch.randn(logits.shape, generator=ctx.rng(f"splitk/{calls}"))
        noisy = logits * (1 + relative * noise.to(logits))
        weights, ids = noisy.float().softmax(-1).topk(chosen.shape[-1], dim=-1)
        if module.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return noisy, weights.to(logits.dtype), ids

    return faulty
