"""Partial sums of the expert layer added in bf16."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Operator


@fault(
    seam=Operator("experts", side="rollout"),
    seen_in=["https://github.com/vllm-project/vime/issues/64"],
    expects=[Rises("logprob_gap")],
    moe=True,
    needs=["experts"],
    look_alikes=["rollout_weights_in_bf16", "swiglu_sigmoid_bf16", "rollout_logprob_precision"],
)
def expert_sums_reduced_in_bf16(clean):
    """The contributions of a token's experts are rounded to bf16 and added up one by one in bf16.

    What breaks: a reduction over ranks in the payload's precision rounds after every addition.
    In the wild: tensor parallelism over 16 ranks: the gap was several times that of one machine, with no weight update
        in between. The reduction across machines was suspected there, not proven.
    Looks like: a small constant log-probability gap on the rollout's side; loss and gradients do not respond.
    """

    def faulty(ctx, module, hidden, chosen, weights):
        import torch

        total = torch.zeros_like(hidden, dtype=torch.bfloat16)
        for k in range(chosen.shape[-1]):
            total += clean(module, hidden, chosen[:, k : k + 1], weights[:, k : k + 1]).bfloat16()
        return total.to(hidden.dtype)

    return faulty
