"""Log-probabilities of the truncated distribution reported."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Stage


@fault(
    seam=(Stage.ROLLOUT, Stage.ROLLOUT_LOGPROBS),
    seen_in=[
        "https://github.com/huggingface/trl/issues/6789",
        "https://github.com/NVIDIA-NeMo/RL/issues/69",
        "https://github.com/modelscope/ms-swift/issues/8442",
        "https://github.com/vllm-project/vllm/issues/42259",
    ],
    expects=[Rises("logprob_gap")],
    look_alikes=["temperature_missing_in_logprob", "rollout_logprob_precision"],
)
def truncated_logprobs_renormalised(clean, *, top_p=0.9):
    """The rollout reports log-probabilities renormalised over the nucleus, the trainer over the vocabulary.

    What breaks: after top-p the engine's probabilities sum to one over the kept tokens, so each is too high by the
        logarithm of the kept mass. A token outside the nucleus, which only a replayed response has, counts as kept.
    In the wild: engines asked for processed log-probabilities under top-p, top-k or min-p sampling.
    Looks like: a gap of one sign, bounded by ``-log(top_p)`` inside the nucleus, that shrinks with the entropy.
    """

    def faulty(ctx, batch):
        import torch

        exact = ctx.ops.logprob

        def logprob(logits, tokens, temperature):
            probs, order = (logits / temperature).softmax(-1).sort(descending=True)
            inside = probs.cumsum(-1) - probs < top_p
            kept = torch.zeros_like(inside).scatter(-1, order, inside).scatter(-1, tokens[..., None], True)
            return exact(logits.masked_fill(~kept, -torch.inf), tokens, temperature)

        return clean(ctx.replacing(logprob=logprob), batch)

    return faulty
