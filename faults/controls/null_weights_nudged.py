"""Null arm of replay: every weight moved by one rounding unit."""

from harness.catalogue import fault
from harness.seams import Stage


@fault(seam=Stage.PROMPTS, seen_in=[], expects=[], control=True)
def null_weights_nudged(clean, *, draw: int = 0):
    """Moves every trainer weight to a neighbouring floating-point number: how far do two healthy runs drift apart?

    What breaks: nothing; another kernel or another order of summation moves weights as much.
    In the wild: every healthy run.
    Looks like: differences at the level of rounding, which training then amplifies. Another ``draw`` moves the
    weights in other directions.
    """

    def faulty(ctx):
        import torch

        generator = ctx.rng(f"null_weights {draw}" if draw else "null_weights")
        with torch.no_grad(), ctx.trainer.whole(write=True):
            for p in ctx.trainer.model.parameters():
                up = torch.rand(p.shape, generator=generator) < 0.5
                towards = torch.where(up, torch.inf, -torch.inf).to(p.dtype)
                p.copy_(torch.nextafter(p, towards))
        return clean(ctx)

    return faulty
