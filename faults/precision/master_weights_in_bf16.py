"""No fp32 master copy of the weights."""

from harness.catalogue import fault
from harness.claims import Scatters, Shifts
from harness.seams import Stage


@fault(
    seam=Stage.STEP,
    seen_in=[
        "https://github.com/areal-project/AReaL/issues/1292",
        "https://github.com/meta-pytorch/torchtune/issues/2254",
        "https://github.com/NVIDIA/apex/issues/1728",
    ],
    expects=[Shifts("update_norm"), Scatters("loss")],
)
def master_weights_in_bf16(clean):
    """After every optimiser step the weights are rounded to bf16, and nothing else remembers them.

    What breaks: an update smaller than half a unit in the last place of its weight vanishes; one that is larger moves
        the weight by a whole unit.
    In the wild: AdamW built over bf16 parameters; in one report no weight of a layer had moved after 100 steps.
    Looks like: a jump of the update norm in the first step, then updates of another size; progress stalls later.
    """

    def faulty(ctx, grads):
        import torch

        update = clean(ctx, grads)
        with torch.no_grad(), ctx.trainer.whole(write=True):
            for parameter in ctx.trainer.model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
        return update

    return faulty
