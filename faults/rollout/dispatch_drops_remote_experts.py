"""Tokens for experts of another rank never sent."""

from harness.catalogue import fault
from harness.claims import Falls, Rises
from harness.seams import Operator


@fault(
    seam=Operator("experts", side="rollout"),
    mode="free",
    seen_in=["https://github.com/vllm-project/vllm-ascend/issues/1856"],
    expects=[Rises("logprob_gap"), Falls("reward")],
    moe=True,
    needs=["experts"],
    look_alikes=["moe_output_reduced_twice", "expert_ids_not_remapped"],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.75 [0.64, 0.97]: the interval straddles the bar",
)
def dispatch_drops_remote_experts(clean):
    """Dispatch and combine do nothing, so the contribution of experts on the other rank is missing.

    What breaks: the upper half of the experts adds nothing to the output, and weights are not renormalised for it.
        Pruning keeps the order of experts, so the half of a proxy is not the half of its original.
    In the wild: data parallelism over an engine whose platform had only the empty base class of the exchange.
    Looks like: a constant gap of the size of half an expert layer, and a lower reward.
    """

    def faulty(ctx, module, hidden, chosen, weights):
        remote = chosen >= module.num_experts // 2
        return clean(module, hidden, chosen, weights.masked_fill(remote, 0.0))

    return faulty
