"""Router input disturbed now and then."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Module


@fault(
    seam=Module("router", side="rollout"),
    seen_in=["https://github.com/vllm-project/vllm-ascend/issues/8359"],
    expects=[Rises("logprob_gap")],
    severity="scale",
    moe=True,
    needs=["router"],
    look_alikes=["routing_not_replayed"],
)
def router_input_glitches(clean, *, scale=0.5, every=4):
    """One forward in a few reaches the rollout's routers with a disturbed hidden state.

    What breaks: the reduction before the gate returns a wrong sum at times; each value is off by ``scale`` times its
        own size, so other experts are chosen. The next call is right again.
    In the wild: expert choices that fluctuated from run to run on one accelerator, traced to a reduction operator.
    Looks like: every few steps a high log-probability gap, none in between; over a window that is a higher level.
    """
    calls = 0

    def faulty(ctx, module, hidden):
        import torch

        nonlocal calls
        calls += 1
        if (calls - 1) % every:
            return clean(module, hidden)
        noise = torch.randn(hidden.shape, generator=ctx.rng(f"glitch/{calls}"))
        return clean(module, hidden * (1 + scale * noise.to(hidden)))

    return faulty
