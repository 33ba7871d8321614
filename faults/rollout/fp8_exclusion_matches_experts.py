"""Expert projections quantised on one side only."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Operator


@fault(
    seam=Operator("experts", side="trainer"),
    seen_in=["https://github.com/verl-project/verl/issues/7519"],
    expects=[Rises("logprob_gap")],
    moe=True,
    needs=["experts"],
    look_alikes=["swiglu_sigmoid_bf16", "expert_sums_reduced_in_bf16"],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.83 [0.66, 0.88]: the interval straddles the bar",
)
def fp8_exclusion_matches_experts(clean):
    """The trainer quantises the gate-up projection to FP8 and the rollout leaves it alone.

    What breaks: the rollout's list of layers to leave unquantised is matched as a substring, so the entry for the
        router also matches the experts' fused projection. The trainer rounds it to e4m3 with a scale per expert.
    In the wild: an audit found dozens of parameters excluded that way.
    Looks like: a constant log-probability gap from the first step, without a trend.
    """

    def faulty(ctx, module, *args):
        import torch

        weight = module.gate_up_proj
        scale = weight.detach().abs().amax((1, 2), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        rounded = (weight.detach() / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale

        class Quantised:
            """The experts with one weight rounded; gradients pass straight through."""

            gate_up_proj = weight + (rounded - weight).detach()

            def __getattr__(self, name):
                return getattr(module, name)

        return clean(Quantised(), *args)

    return faulty
