"""Replayed experts weighted by zeroed scores."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Module


@fault(
    seam=Module("router", side="trainer"),
    seen_in=["https://github.com/ISEEKYAN/Megatron-LM/issues/79"],
    expects=[Rises("logprob_gap")],
    moe=True,
    needs=["router"],
    look_alikes=["routing_not_replayed", "stale_rollout_weights"],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.66 [0.59, 0.78]: the interval straddles the bar",
)
def replay_gathers_zeroed_scores(clean):
    """The weights of replayed experts are read from scores in which all but the own choice are zero.

    What breaks: an expert that the rollout chose and the drifted router would not gets weight 0, and no gradient. The
        replayed choice is that of the router's weights of the step at which the fault set in.
    In the wild: a replay that gathered after the top-k mask in place of before it.
    Looks like: nothing at first; the log-probability gap grows as the router drifts from what is replayed.
    """
    recorded = []

    def faulty(ctx, module, hidden):
        import torch

        if not recorded:
            recorded.append(module.weight.detach().clone())
        logits, weights, chosen = clean(module, hidden)
        scores = torch.zeros_like(logits).scatter(-1, chosen, weights)
        replayed = (hidden.reshape(-1, hidden.shape[-1]).detach() @ recorded[0].T).topk(chosen.shape[-1], dim=-1)
        return logits, scores.gather(-1, replayed.indices), replayed.indices

    return faulty
