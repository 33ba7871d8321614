"""The last micro-batch of a window does not count."""

from harness.catalogue import fault
from harness.claims import Rises, Scatters
from harness.seams import Stage


@fault(
    seam=Stage.BACKWARD,
    seen_in=[
        "https://github.com/deepspeedai/DeepSpeed/issues/1488",
        "https://github.com/deepspeedai/DeepSpeed/issues/966",
        "https://github.com/deepspeedai/DeepSpeed/issues/757",
    ],
    expects=[Scatters("grad_norm"), Rises("kl")],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.78 [0.59, 0.84]: the interval straddles the bar",
)
def last_micro_batch_dropped(clean):
    """The gradient of the last micro-batch of every mini-batch never reaches the optimiser.

    What breaks: the step is taken at the accumulation boundary before the last gradient has been added.
    In the wild: partitioning stages whose losses drifted apart as soon as gradients were accumulated.
    Looks like: the logged loss is complete, the gradient is not: its norm scatters, and the policy drifts away faster.
    """
    calls = 0

    def faulty(ctx, scaled):
        nonlocal calls
        calls += 1
        if calls % ctx.rl.micro_batches:
            clean(ctx, scaled)

    return faulty
