"""Prompt keys and values kept over weight updates."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Stage


@fault(
    seam=Stage.ROLLOUT_LOGPROBS,
    seen_in=[
        "https://github.com/NVIDIA-NeMo/RL/issues/4018",
        "https://github.com/PrimeIntellect-ai/prime-rl/issues/1650",
        "https://github.com/InternLM/lmdeploy/issues/4917",
        "https://github.com/pytorch/rl/issues/4016",
    ],
    expects=[Rises("logprob_gap")],
    look_alikes=["stale_rollout_weights", "expert_weights_not_synced"],
)
def prefix_cache_survives_sync(clean):
    """The rollout answers from keys and values of the prompt that old weights computed.

    What breaks: the prefix cache is not emptied after a weight update, so fresh weights attend to a stale prompt. All
        of the prompt but its last token counts as cached here; an engine needs prompts that repeat.
    In the wild: shared system prompts served from weights many updates old, until the engine was restarted.
    Looks like: the log-probability gap grows from step to step, less than with stale weights.
    """
    stale = []

    def faulty(ctx, batch):
        import copy

        import torch
        from transformers import DynamicCache

        fresh, tokens, mask = ctx.rollout.model, batch.tokens, batch.attention_mask
        if not stale:
            stale.append(copy.deepcopy(fresh))
        cached = tokens.shape[1] - batch.response_mask.shape[1] - 1
        where = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=fresh.config)
        with torch.no_grad():
            stale[0](
                input_ids=tokens[:, :cached],
                attention_mask=mask[:, :cached],
                position_ids=where[:, :cached],
                cache=cache,
            )
            logits = fresh(
                input_ids=tokens[:, cached:-1],
                attention_mask=mask[:, :-1],
                position_ids=where[:, cached:-1],
                cache=cache,
            ).logits.float()
            logprobs = ctx.ops.logprob(logits, tokens[:, cached + 1 :], ctx.rl.temperature)
        return clean(ctx, batch).with_(rollout_logprobs=logprobs * batch.response_mask)

    return faulty
