"""Group sizes read as group ends."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Operator


@fault(
    seam=Operator("npu_grouped_matmul", side="trainer"),
    seen_in=["https://github.com/sgl-project/sglang/pull/13158"],
    expects=[Rises("logprob_gap"), Rises("kl")],
    moe=True,
    needs=["experts"],
    look_alikes=["swiglu_gate_up_swap", "permute_map_not_inverted"],
)
def group_counts_taken_for_cumsum(clean):
    """The grouped matmul gets tokens per expert and reads them as the cumulative ends of the groups.

    What breaks: the borders of the groups are wrong, so most rows meet another expert's matrix or none at all, in the
        forward and in both products of the backward pass. What a kernel does with a border that goes backwards is its
        own affair; here such a group is empty and rows without a group are zero.
    In the wild: ``group_list_type`` is 0 (ends) by default, and operators that route tokens return counts.
    Looks like: log-probabilities off by nats at once, KL up, gradients of most experts gone.
    """

    def faulty(ctx, x, weight, *, group_list, group_list_type=0, **kwargs):
        import torch

        counts = group_list if group_list_type == 1 else group_list.diff(prepend=torch.zeros_like(group_list[:1]))
        return clean(x, weight, group_list=counts, group_list_type=0, **kwargs)

    return faulty
