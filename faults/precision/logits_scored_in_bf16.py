"""Log-probabilities taken from half-precision logits."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Stage


@fault(
    seam=(Stage.OLD_LOGPROBS, Stage.LOGPROBS),
    seen_in=[
        "https://github.com/OpenRLHF/OpenRLHF/issues/634",
        "https://github.com/huggingface/transformers/issues/31267",
        "https://github.com/ServiceNow/Fast-LLM/issues/525",
    ],
    expects=[Rises("logprob_gap")],
    look_alikes=["rollout_weights_in_bf16", "router_logits_bf16"],
)
def logits_scored_in_bf16(clean):
    """The trainer's log-softmax runs on logits rounded to bf16.

    What breaks: logits keep 8 bits, so the log-probability of a token is off by up to half a percent of the logit.
    In the wild: a library release that no longer upcast logits; the KL to the reference got a noisy floor.
    Looks like: a small log-probability gap from the first step on, without a trend; ratios a little off one.
    """

    def faulty(ctx, batch):
        import torch

        logprob = ctx.ops.logprob

        def rounded(logits, tokens, temperature):
            low = logits.to(torch.bfloat16)
            logits = logits + (low.to(logits.dtype) - logits).detach()
            return logprob(logits, tokens, temperature)

        return clean(ctx.replacing(logprob=rounded), batch)

    return faulty
