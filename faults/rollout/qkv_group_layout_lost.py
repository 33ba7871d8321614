"""Query, key and value rows fused by group and split by kind."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Stage


@fault(
    seam=Stage.SYNC,
    seen_in=[
        "https://github.com/NVIDIA-NeMo/RL/issues/2802",
        "https://github.com/NVIDIA/Megatron-LM/issues/1989",
    ],
    expects=[Rises("logprob_gap")],
    needs=["attention"],
    look_alikes=["gate_up_interleaved_on_export", "shards_gathered_out_of_order"],
)
def qkv_group_layout_lost(clean):
    """The fused attention weight is packed group by group and split as if all queries came first.

    What breaks: with grouped-query attention the packed rows are queries, key, value of group 0, then of group 1; a
        reader that expects all queries, all keys, all values takes keys for queries. With one group both layouts agree.
    In the wild: a packed projection fed to, or split by, code of the other convention.
    Looks like: scrambled attention: a log-probability gap in nats at once, while the trainer's own loss is normal.
    """

    def faulty(ctx, update):
        import torch

        clean(ctx, update)
        for _, attention in ctx.rollout.modules("attention"):
            parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
            groups = len(parts[1]) // attention.head_dim
            fused = torch.cat([w.unflatten(0, (groups, -1)) for w in parts], dim=1).flatten(0, 1)
            for weight, rows in zip(parts, fused.split([len(w) for w in parts]), strict=True):
                weight.copy_(rows)

    return faulty
