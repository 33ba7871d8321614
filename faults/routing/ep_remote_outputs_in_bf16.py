"""Outputs of remote experts returned in bf16."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Operator


@fault(
    seam=Operator("experts", side="trainer"),
    seen_in=["https://github.com/NVIDIA-NeMo/RL/issues/4243"],
    expects=[Rises("logprob_gap")],
    moe=True,
    needs=["experts"],
    look_alikes=["expert_sums_reduced_in_bf16", "replay_recomputes_weights"],
)
def ep_remote_outputs_in_bf16(clean):
    """The trainer gets the outputs of experts on the other rank back in bf16.

    What breaks: the exchange between expert-parallel ranks rounds what the upper half of the experts contributes; the
        local half is added exactly. A token's error depends on where its experts lie.
    In the wild: a gap between training and generation that followed the trainer's degree of expert parallelism and that
        no change of the engine repaired; the cause is open.
    Looks like: a small log-probability gap that comes with the trainer's parallel layout, not with the weights.
    """

    def faulty(ctx, module, hidden, chosen, weights):
        remote = chosen >= module.num_experts // 2
        near = clean(module, hidden, chosen, weights.masked_fill(remote, 0.0))
        far = clean(module, hidden, chosen, weights.masked_fill(~remote, 0.0))
        return near + far.bfloat16().to(near.dtype)

    return faulty
