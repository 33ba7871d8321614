"""Expert weights left out of the sync."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Stage


@fault(
    seam=Stage.SYNC,
    seen_in=[
        "https://github.com/NovaSky-AI/SkyRL/issues/1471",
        "https://github.com/sgl-project/sglang/issues/14178",
        "https://github.com/NovaSky-AI/SkyRL/issues/1345",
    ],
    expects=[Rises("logprob_gap")],
    moe=True,
    needs=["experts"],
    look_alikes=["stale_rollout_weights", "rollout_weights_averaged"],
)
def expert_weights_not_synced(clean):
    """The sync hands over everything but the experts.

    What breaks: a group of expert tensors that does not fit one transfer bucket is never yielded, so the rollout runs
        fresh attention and routers over experts of long ago.
    In the wild: grouped expert exports split at a bucket's boundary, in two projects.
    Looks like: the log-probability gap grows with every update, more slowly than with no sync at all.
    """

    def faulty(ctx, update):
        kept = [(p, p.clone()) for _, experts in ctx.rollout.modules("experts") for p in experts.parameters()]
        clean(ctx, update)
        for weight, before in kept:
            weight.copy_(before)

    return faulty
