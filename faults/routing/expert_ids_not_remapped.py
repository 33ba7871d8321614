"""Expert numbers not translated to physical slots."""

from harness.catalogue import fault
from harness.claims import Falls, Rises
from harness.seams import Module


@fault(
    seam=Module("router", side="rollout"),
    mode="free",
    seen_in=["https://github.com/sgl-project/sglang/issues/36861"],
    expects=[Rises("logprob_gap"), Falls("reward")],
    moe=True,
    needs=["router"],
    look_alikes=["expert_slots_shifted", "dispatch_drops_remote_experts"],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.13 [0.12, 0.99]: the interval straddles the bar",
)
def expert_ids_not_remapped(clean):
    """The rollout's router sends tokens to logical numbers where the experts lie in other slots.

    What breaks: the load balancer placed the experts elsewhere, and the top-k step is not told; here the slots are the
        experts in reverse order.
    In the wild: an engine whose normal path did not hand the placement to top-k; output became one repeated token.
    Looks like: the sampler is useless at once: the reward drops, the gap is in nats, the trainer looks healthy.
    """

    def faulty(ctx, module, hidden):
        logits, weights, chosen = clean(module, hidden)
        return logits, weights, logits.shape[-1] - 1 - chosen

    return faulty
