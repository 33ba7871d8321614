"""Shards of a parameter joined in the wrong order."""

from harness.catalogue import fault
from harness.claims import Falls, Rises
from harness.seams import Stage


@fault(
    seam=Stage.SYNC,
    mode="free",
    seen_in=["https://github.com/Open-Athena/MarinFold/issues/236"],
    expects=[Rises("logprob_gap"), Falls("reward")],
    look_alikes=["qkv_group_layout_lost", "expert_slots_shifted"],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.22 [0.21, 0.96]: the interval straddles the bar",
)
def shards_gathered_out_of_order(clean, *, shards=2):
    """The shards of every matrix are joined in rotated order before they are handed over.

    What breaks: with weights sharded over ranks the sync rebuilds each matrix from its row blocks, starting with the
        wrong rank's. The trainer itself never sees the joined matrix.
    In the wild: a sync that ruined the engine's copy only when sharded, also at learning rate 0, which acquits the
        gradients; the step that went wrong there was not named.
    Looks like: the policy that samples is destroyed by the first sync: reward gone, gap in nats.
    """

    def faulty(ctx, update):
        import torch

        clean(ctx, update)
        for weight in ctx.rollout.model.parameters():
            if weight.dim() > 1:
                first, *others = weight.tensor_split(shards)
                weight.copy_(torch.cat([*others, first]))

    return faulty
