"""RMSNorm evaluated wholly in a half type."""

from harness.catalogue import fault
from harness.claims import Shifts
from harness.seams import Module


@fault(
    seam=Module("norm", side="trainer"),
    seen_in=[
        "https://github.com/young-geng/EasyLM/issues/50",
        "https://github.com/pytorch/pytorch/issues/189581",
        "https://github.com/vllm-project/vllm/issues/3653",
        "https://github.com/unslothai/unsloth/issues/217",
    ],
    expects=[Shifts("logprob_gap")],
    look_alikes=["router_logits_bf16"],
)
def rmsnorm_no_fp32_upcast(clean, *, dtype="bfloat16"):
    """RMSNorm squares, averages and scales in a half type instead of fp32.

    What breaks: the mean of squares and the product with the weight are rounded to 8 (bf16) or 11 (fp16) bits.
    In the wild: an fp16 run whose loss was 2 instead of 0.12; a bf16 norm off by a factor 1.7 at small variance.
    Looks like: the trainer's log-probabilities shift against the rollout's; the gradient norm changes a little.
    """

    def faulty(ctx, module, hidden):
        import torch

        low = getattr(torch, dtype)
        x, weight = hidden.to(low), module.weight.to(low)
        variance = (x * x).mean(-1, keepdim=True)
        return (weight * (x * torch.rsqrt(variance + module.variance_epsilon))).to(hidden.dtype)

    return faulty
