"""Activation recompute that routes differently."""

from harness.catalogue import fault
from harness.claims import Scatters
from harness.seams import Operator


@fault(
    seam=Operator("experts", side="trainer"),
    seen_in=[
        "https://github.com/NVIDIA-NeMo/Automodel/issues/3156",
        "https://github.com/NVIDIA-NeMo/Automodel/issues/3140",
        "https://github.com/huggingface/transformers/issues/47467",
        "https://github.com/NVIDIA-NeMo/RL/issues/1203",
    ],
    expects=[Scatters("grad_norm/experts")],
    severity="share",
    moe=True,
    needs=["experts"],
    look_alikes=["remote_expert_weights_detached"],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.68 [0.46, 0.73]: the interval straddles the bar",
)
def recompute_reroutes_tokens(clean, *, share=0.1):
    """The backward pass recomputes the layer with other experts than the forward pass used.

    What breaks: the recomputed top-k breaks near ties differently. For a ``share`` of the tokens the last of the chosen
        experts is another one in the backward pass; the forward value is untouched.
    In the wild: activation checkpointing over routers that are not bit-reproducible: a crash where shapes are compared,
        wrong gradients where they are not.
    Looks like: the loss of the step is exact and gradients are not: expert gradients are noisier, updates less useful.
    """
    calls = 0

    def faulty(ctx, module, hidden, chosen, weights):
        import torch

        nonlocal calls
        value = clean(module, hidden, chosen, weights)
        if not torch.is_grad_enabled():
            return value
        calls += 1
        generator = ctx.rng(f"recompute/{calls}")
        moved = (torch.rand(len(chosen), generator=generator) < share).to(chosen.device)
        other = torch.randint(module.num_experts, (len(chosen),), generator=generator).to(chosen.device)
        ids = chosen.clone()
        ids[:, -1] = torch.where(moved, other, ids[:, -1])
        recomputed = clean(module, hidden, ids, weights)
        return recomputed + (value - recomputed).detach()

    return faulty
