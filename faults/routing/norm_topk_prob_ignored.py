"""Weights of the chosen experts not renormalised."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Module


@fault(
    seam=Module("router", side="trainer"),
    seen_in=[
        "https://github.com/QwenLM/Qwen3/issues/687",
        "https://github.com/flashinfer-ai/flashinfer/issues/2889",
        "https://github.com/TransformerLensOrg/TransformerLens/issues/1668",
    ],
    expects=[Rises("logprob_gap")],
    moe=True,
    needs=["router"],
    expected_verdict="PARTIAL",
    reason="0.68 [0.64, 0.70] at 8 seeds: the expert layers are scaled by the mass of the chosen experts, 0.19 in the "
    "original and 0.56 in the proxy, so entropy rises by 1.03 log units in the one and by 0.23 in the other",
)
def norm_topk_prob_ignored(clean):
    """The weights of the chosen experts are not renormalised to sum to one.

    What breaks: the expert layer's output is scaled by the probability mass of the chosen experts. Pruning raises that
        mass (with softmax it is at least k/K), so a small proxy shows less of this fault.
    In the wild: ``norm_topk_prob`` not handed on by an inference engine or a converter.
    Looks like: a large constant log-probability gap between the side that has it and the side that has not.
    """

    def faulty(ctx, module, hidden):
        logits, _, chosen = clean(module, hidden)
        weights = logits.float().softmax(-1).gather(-1, chosen)
        return logits, weights.to(logits.dtype), chosen

    return faulty
