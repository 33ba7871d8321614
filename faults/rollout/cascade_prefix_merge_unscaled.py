"""Attention over a shared prefix merged with equal weights."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Operator


@fault(
    seam=Operator("attention", side="rollout"),
    seen_in=[
        "https://github.com/vllm-project/vllm/issues/22103",
        "https://github.com/verl-project/verl/issues/3595",
        "https://github.com/allenai/open-instruct/issues/1006",
    ],
    expects=[Rises("logprob_gap")],
    needs=["attention"],
    look_alikes=["qkv_group_layout_lost"],
)
def cascade_prefix_merge_unscaled(clean, *, prefix=4):
    """Attention over the shared prefix and over the rest are averaged, not weighted by their softmax mass.

    What breaks: cascade attention computes the ``prefix`` first positions apart and must join both parts by their
        log-sum-exp; with equal weights a prefix that matters little counts as much as the rest. Positions are counted
        with the padding, and a row whose prefix is all padding has nothing to merge.
    In the wild: wrong outputs on some accelerators for batches that share a prompt, as the groups of GRPO do.
    Looks like: a lasting log-probability gap on one side only; gradient norms may explode later.
    """

    def faulty(ctx, module, query, key, value, mask, **kwargs):
        import torch

        whole, weights = clean(module, query, key, value, mask, **kwargs)
        if mask is None or key.shape[2] <= prefix:
            return whole, weights
        first, rest = (
            clean(module, query, key[:, :, part], value[:, :, part], mask[..., part], **kwargs)[0]
            for part in (slice(None, prefix), slice(prefix, None))
        )
        visible = mask if mask.dtype == torch.bool else mask == 0
        both = visible[..., :prefix].any(-1) & visible[..., prefix:].any(-1)  # [B, 1, Q]
        return torch.where(both[:, 0, :, None, None], (first + rest) / 2, whole), weights

    return faulty
