"""Running average of the weights handed to the rollout."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Stage


@fault(
    seam=Stage.SYNC,
    seen_in=["https://github.com/vllm-project/vime/issues/64"],
    expects=[Rises("logprob_gap")],
    severity="decay",
    look_alikes=["stale_rollout_weights", "expert_weights_not_synced"],
)
def rollout_weights_averaged(clean, *, decay=0.9):
    """The rollout gets a running average of the trainer's weights in place of the last ones.

    What breaks: each sync moves the rollout only by the share ``1 - decay`` of the way to the trainer.
    In the wild: a measured comparison of two engines from one start, one of which drifted to three times the gap in
        thirty rollouts; its cause is not known, and an average is the smallest defect that drifts and then levels off.
    Looks like: the log-probability gap grows over about ``1 / (1 - decay)`` steps and then follows the update size.
    """

    def faulty(ctx, update):
        before = [p.clone() for p in ctx.rollout.model.parameters()]
        clean(ctx, update)
        for weight, old in zip(ctx.rollout.model.parameters(), before, strict=True):
            weight.lerp_(old, decay)

    return faulty
