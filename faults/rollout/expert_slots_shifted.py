"""Expert weights sliced by the offsets of another rank."""

from harness.catalogue import fault
from harness.claims import Falls, Rises
from harness.seams import Stage


@fault(
    seam=Stage.SYNC,
    mode="free",
    seen_in=["https://github.com/NovaSky-AI/SkyRL/issues/1816"],
    expects=[Rises("logprob_gap"), Falls("reward")],
    moe=True,
    needs=["experts"],
    look_alikes=["expert_ids_not_remapped", "expert_reload_layout_lost"],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.25 [0.22, 0.92]: the interval straddles the bar",
)
def expert_slots_shifted(clean):
    """Every expert's weights land in the slot of the next expert of the rollout.

    What breaks: the packed buffer of a sync is cut up by the names of another rank, so the bytes are right and the
        names are not; shapes agree, so nothing complains.
    In the wild: one trainer's transfer between processes, where each rank's buffer was read with rank 0's table.
    Looks like: fluent rubbish from the first sync on: the reward drops, the log-probability gap is in nats.
    """

    def faulty(ctx, update):
        clean(ctx, update)
        for _, experts in ctx.rollout.modules("experts"):
            for weight in experts.parameters():
                weight.copy_(weight.roll(1, 0))

    return faulty
