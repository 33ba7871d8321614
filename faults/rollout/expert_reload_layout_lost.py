"""Expert matrices transposed a second time on reload."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Stage


@fault(
    seam=Stage.SYNC,
    seen_in=[
        "https://github.com/NovaSky-AI/SkyRL/issues/1680",
        "https://github.com/NovaSky-AI/SkyRL/issues/1737",
        "https://github.com/vllm-project/vllm-ascend/issues/12226",
        "https://github.com/vllm-project/vllm-ascend/issues/7498",
        "https://github.com/verl-project/verl/issues/7978",
    ],
    expects=[Rises("logprob_gap")],
    moe=True,
    needs=["experts"],
    look_alikes=["expert_slots_shifted", "gate_up_interleaved_on_export"],
)
def expert_reload_layout_lost(clean):
    """A reload packs expert matrices in the kernel's layout, and they are read in the checkpoint's.

    What breaks: the engine rearranges expert weights after the first load; the step is not idempotent, so a reload
        leaves each matrix stored transposed under its old shape.
    In the wild: gibberish from mixture-of-experts models after the first weight update or after waking up, where dense
        models were fine.
    Looks like: the first rollout agrees, every one after the first sync is off by nats.
    """

    def faulty(ctx, update):
        clean(ctx, update)
        for _, experts in ctx.rollout.modules("experts"):
            for weight in experts.parameters():
                weight.copy_(weight.transpose(1, 2).contiguous().view(weight.shape))

    return faulty
