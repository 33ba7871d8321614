"""Experts exported under the numbers that they have on their own rank."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Stage


@fault(
    seam=Stage.SYNC,
    seen_in=[
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/1716",
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/1817",
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/1871",
    ],
    expects=[Rises("logprob_gap")],
    moe=True,
    needs=["experts"],
    look_alikes=["expert_slots_shifted", "expert_weights_not_synced"],
)
def expert_export_local_ids(clean):
    """The second expert-parallel rank exports its experts under local numbers, over those of the first.

    What breaks: without the rank's offset the upper half of the experts is written into the lower half's slots, and
        nobody writes the upper half any more.
    In the wild: exports with expert parallelism above one, through a bridge between two checkpoint formats.
    Looks like: a large log-probability gap from the first sync, which the stale half lets grow a little.
    """

    def faulty(ctx, update):
        weights = [p for _, experts in ctx.rollout.modules("experts") for p in experts.parameters()]
        before = [p[len(p) // 2 :].clone() for p in weights]
        clean(ctx, update)
        for weight, upper in zip(weights, before, strict=True):
            half = len(weight) // 2
            weight[:half].copy_(weight[-half:])
            weight[half:].copy_(upper)

    return faulty
