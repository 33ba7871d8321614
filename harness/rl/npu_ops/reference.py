"""What the fused Ascend operators compute, in plain torch, under the names and signatures of torch_npu.

Signatures and semantics: the operator lists of torch_npu (op_plugin_functions.yaml) and its API reference. Arguments
that are accepted there and have no reference here are refused, never ignored. Shape suffixes: ``B`` sequences, ``S``
length, ``N`` heads, ``D`` head dimension, ``T`` tokens, ``K`` experts per token, ``E`` experts, ``H`` hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

MAX_INT32 = 2147483647
COMPRESSED = (2048, 2048)  # shape of the mask that the causal sparse modes ask for


def _wide(x: torch.Tensor) -> torch.Tensor:
    """The precision that the operators work in: fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _refuse(operator: str, **given: Any) -> None:
    for name, (value, allowed) in given.items():
        if value not in allowed:
            raise ValueError(f"{operator}: {name} = {value!r} has no reference implementation; allowed: {allowed}")


def npu_rms_norm(self: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """Root-mean-square norm over the last dimension (arXiv 1910.07467).

    Returns:
        ``y`` in the type of the input, and ``rstd`` ``[..., 1]`` in fp32 (or wider).
    """
    x = _wide(self)
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    return (x * rstd * _wide(gamma)).to(self.dtype), rstd


def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Residual addition and norm in one: ``y``, ``rstd``, and the sum ``x1 + x2`` for the next residual."""
    x = x1 + x2
    y, rstd = npu_rms_norm(x, gamma, epsilon)
    return y, rstd, x


def npu_swiglu(self: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``silu(first half) * second half`` along a dimension of even size: the input is gate, then up."""
    if self.shape[dim] % 2:
        raise ValueError(f"npu_swiglu: dimension {dim} must be even, got {self.shape[dim]}")
    gate, up = self.chunk(2, dim=dim)
    return torch.nn.functional.silu(gate) * up


def npu_rotary_mul(
    input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half", rotate: Any = None
) -> torch.Tensor:
    """Rotary position embedding ``x * r1 + rotated(x) * r2``.

    Args:
        input: ``[..., D]`` with even D below 896.
        r1: Cosines, broadcastable.
        r2: Sines, broadcastable.
        rotary_mode: ``half`` pairs dimension i with i + D/2 (GPT-NeoX), ``interleave`` 2i with 2i + 1 (GPT-J).
        rotate: Has no reference; must be None.
    """
    _refuse("npu_rotary_mul", rotary_mode=(rotary_mode, ("half", "interleave")), rotate=(rotate, (None,)))
    if input.shape[-1] % 2 or input.shape[-1] >= 896:
        raise ValueError(f"npu_rotary_mul: the head dimension must be even and below 896, got {input.shape[-1]}")
    if rotary_mode == "half":
        first, second = input.chunk(2, dim=-1)
        rotated = torch.cat((-second, first), dim=-1)
    else:
        rotated = torch.stack((-input[..., 1::2], input[..., 0::2]), dim=-1).flatten(-2)
    return input * r1 + rotated * r2


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = MAX_INT32,
    next_tockens: int = MAX_INT32,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """Attention in one kernel.

    Args:
        query: In ``input_layout``; keys and values may have fewer heads, a divisor of ``head_num``.
        key: As ``query``.
        value: As ``query``.
        head_num: Heads of the query.
        input_layout: ``BSH``, ``SBH``, ``BSND`` or ``BNSD``.
        pse: Has no reference; must be None.
        padding_mask: Must be None.
        atten_mask: Boolean (or uint8); True is **masked out**. ``[S, S]``, ``[B or 1, N or 1, S, S]``; the compressed
            upper triangle ``[2048, 2048]`` for sparse modes 2 and 3.
        scale: Factor of the scores; its default is 1, not ``1 / sqrt(D)``.
        keep_prob: Must be 1: without dropout.
        pre_tockens: Must be its default.
        next_tockens: Must be its default.
        inner_precise: 2 gives zeros for rows that attend to nothing; with 0 such rows average all keys.
        prefix: Must be None.
        actual_seq_qlen: Must be None.
        actual_seq_kvlen: Must be None.
        sparse_mode: 0 and 1: the mask as it is; 2: causal, aligned top left; 3: causal, aligned bottom right.
        gen_mask_parallel: Of dropout; ignored.
        sync: Of dropout; ignored.

    Returns:
        The output in ``input_layout``, row maxima and row sums ``[B, N, S, 8]``, an empty tensor, and three zeros.
    """
    _refuse(
        "npu_fusion_attention",
        pse=(pse, (None,)),
        padding_mask=(padding_mask, (None,)),
        keep_prob=(keep_prob, (1.0,)),
        pre_tockens=(pre_tockens, (MAX_INT32,)),
        next_tockens=(next_tockens, (MAX_INT32,)),
        inner_precise=(inner_precise, (0, 2)),
        prefix=(prefix, (None,)),
        actual_seq_qlen=(actual_seq_qlen, (None,)),
        actual_seq_kvlen=(actual_seq_kvlen, (None,)),
        sparse_mode=(sparse_mode, (0, 1, 2, 3)),
    )
    q, k, v = (_to_bnsd(x, input_layout, head_num, query) for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = _wide(q) @ _wide(k).transpose(-1, -2) * scale
    masked = _mask(atten_mask, sparse_mode, scores)
    if masked is not None:
        scores = scores.masked_fill(masked, torch.finfo(scores.dtype).min)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    weights = weights / total
    if masked is not None and inner_precise == 2:
        weights = weights.masked_fill(masked.all(-1, keepdim=True), 0.0)
    out = _from_bnsd((weights @ _wide(v)).to(query.dtype), input_layout)
    eight = (*top.shape[:-1], 8)
    return out, top.expand(eight), total.expand(eight), query.new_empty(0), 0, 0, 0


def _to_bnsd(x: torch.Tensor, layout: str, head_num: int, query: torch.Tensor) -> torch.Tensor:
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    if layout in ("BSH", "SBH"):
        batch_first = x if layout == "BSH" else x.transpose(0, 1)
        dim = query.shape[-1] // head_num
        return batch_first.unflatten(-1, (-1, dim)).transpose(1, 2)
    raise ValueError(f"npu_fusion_attention: layout {layout!r} has no reference; known: BSH, SBH, BSND, BNSD")


def _from_bnsd(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "BNSD":
        return x
    x = x.transpose(1, 2)
    if layout == "BSND":
        return x.contiguous()
    x = x.flatten(2)
    return x if layout == "BSH" else x.transpose(0, 1).contiguous()


def _mask(atten_mask: torch.Tensor | None, sparse_mode: int, scores: torch.Tensor) -> torch.Tensor | None:
    rows, columns = scores.shape[-2:]
    if sparse_mode in (2, 3):
        if atten_mask is None or tuple(atten_mask.shape) != COMPRESSED:
            shape = None if atten_mask is None else tuple(atten_mask.shape)
            raise ValueError(f"npu_fusion_attention: sparse_mode {sparse_mode} needs a {COMPRESSED} mask, got {shape}")
        offset = 0 if sparse_mode == 2 else columns - rows
        return torch.ones(rows, columns, dtype=torch.bool, device=scores.device).triu(offset + 1)
    return None if atten_mask is None else atten_mask.bool()


def npu_grouped_matmul(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    *,
    bias: Any = None,
    scale: Any = None,
    offset: Any = None,
    antiquant_scale: Any = None,
    antiquant_offset: Any = None,
    per_token_scale: Any = None,
    group_list: torch.Tensor | None = None,
    activation_input: Any = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    act_type: int = 0,
    output_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Matrix products of consecutive groups of rows, each with its own matrix.

    Args:
        x: One tensor: ``[M, K]`` for group type 0, ``[K, M]`` for group type 2.
        weight: One tensor: ``[E, K, N]`` for group type 0, ``[M, N]`` for group type 2.
        bias: Must be None, as every argument of quantisation and activation.
        scale: Must be None.
        offset: Must be None.
        antiquant_scale: Must be None.
        antiquant_offset: Must be None.
        per_token_scale: Must be None.
        group_list: ``[E]`` int64.
        activation_input: Must be None.
        split_item: 2 or 3: one output tensor.
        group_type: 0: M is grouped; 2: M, the axis of summation, is grouped.
        group_list_type: 0: ``group_list`` holds cumulative ends (the default); 1: it holds counts.
        act_type: Must be 0.
        output_dtype: Must be None.

    Returns:
        One tensor: ``[M, N]``, or ``[E, K, N]`` for group type 2. Rows beyond the last group are zero here; the kernel
        leaves them as they are in memory. A cumulative end before the previous one makes an empty group.
    """
    unused = (bias, scale, offset, antiquant_scale, antiquant_offset, per_token_scale, activation_input, output_dtype)
    if any(u is not None for u in unused) or act_type != 0:
        raise ValueError("npu_grouped_matmul: bias, quantisation and activation have no reference implementation")
    _refuse(
        "npu_grouped_matmul",
        split_item=(split_item, (2, 3)),
        group_type=(group_type, (0, 2)),
        group_list_type=(group_list_type, (0, 1)),
    )
    if len(x) != 1 or len(weight) != 1 or group_list is None:
        raise ValueError(
            f"npu_grouped_matmul: one x, one weight and a group_list have a reference, got {len(x)} and {len(weight)}"
        )
    spans = _spans(group_list, group_list_type)
    left, right = x[0], weight[0]
    if group_type == 2:
        products = [left[:, a:b] @ right[a:b] for a, b in spans]
        return [torch.stack(products)]
    out = left.new_zeros(left.shape[0], right.shape[-1])
    for (a, b), matrix in zip(spans, right, strict=True):
        if b > a:
            out[a:b] = left[a:b] @ matrix
    return [out]


def _spans(group_list: torch.Tensor, group_list_type: int) -> list[tuple[int, int]]:
    ends = group_list.cumsum(0).tolist() if group_list_type == 1 else group_list.tolist()
    starts = [0, *ends[:-1]]
    return [(a, max(a, b)) for a, b in zip(starts, ends, strict=True)]


def npu_moe_token_permute(
    tokens: torch.Tensor, indices: torch.Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy tokens into the order of their experts.

    Args:
        tokens: ``[T, H]``.
        indices: ``[T, K]`` (or ``[T]``) integers: experts of every token.
        num_out_tokens: Must be None: nothing is dropped.
        padded_mode: Must be False.

    Returns:
        ``[T * K, H]``, stable by expert; and ``sorted_indices`` ``[T * K]`` int32, the row to which each (token, slot)
        went: the inverse of the sorting permutation.
    """
    _refuse("npu_moe_token_permute", num_out_tokens=(num_out_tokens, (None,)), padded_mode=(padded_mode, (False,)))
    slots = 1 if indices.dim() == 1 else indices.shape[1]
    order = indices.flatten().argsort(stable=True)
    return tokens.index_select(0, order // slots), order.argsort(stable=True).int()


def npu_moe_token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Gather rows back into the order of tokens and add up each token's slots.

    Args:
        permuted_tokens: ``[T * K, H]``.
        sorted_indices: ``[T * K]`` int32, as ``npu_moe_token_permute`` returns it.
        probs: ``[T, K]`` weights; None for K = 1 without weights.
        padded_mode: Must be False.
        restore_shape: Must be None.

    Returns:
        ``[T, H]`` in the type of the tokens.
    """
    _refuse("npu_moe_token_unpermute", padded_mode=(padded_mode, (False,)), restore_shape=(restore_shape, (None,)))
    rows = permuted_tokens.index_select(0, sorted_indices)
    if probs is None:
        return rows
    weighted = rows.unflatten(0, tuple(probs.shape)) * probs.unsqueeze(-1)
    return weighted.sum(1).to(permuted_tokens.dtype)


def npu_moe_gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax over experts, then the k largest, not renormalised.

    Args:
        x: ``[T, E]`` logits.
        finished: ``[T]`` bool: such tokens get the expert index E.
        k: Experts per token.

    Returns:
        Weights ``[T, k]`` in the type of ``x``, experts ``[T, k]`` int32, and ``row_idx`` ``[T, k]`` int32, which
        counts down the columns.
    """
    weights, experts = _wide(x).softmax(-1).topk(k, dim=-1)
    if finished is not None:
        experts = experts.masked_fill(finished[:, None], x.shape[-1])
    rows = torch.arange(experts.numel(), device=x.device).view(k, -1).T
    return weights.to(x.dtype), experts.int(), rows.int()


def npu_moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group-limited choice of experts (arXiv 2412.19437, section 2.1.2).

    Args:
        x: ``[T, E]`` logits.
        k: Experts per token.
        bias: ``[E]``: added for the choice only; the weights are those of the unbiased scores.
        k_group: Groups that a token may use.
        group_count: Groups into which the experts are divided.
        group_select_mode: A group's score: 0, its largest; 1, the sum of its two largest.
        renorm: Must be 0.
        norm_type: Scores by softmax (0, the default) or sigmoid (1); sigmoid weights are divided by their sum.
        out_flag: Also return the scores.
        routed_scaling_factor: Factor of the weights.
        eps: Added to the sum.

    Returns:
        Weights ``[T, k]`` in the type of ``x``, experts ``[T, k]`` int32, and the scores ``[T, E]`` (empty without
        ``out_flag``).
    """
    _refuse(
        "npu_moe_gating_top_k",
        renorm=(renorm, (0,)),
        norm_type=(norm_type, (0, 1)),
        group_select_mode=(group_select_mode, (0, 1)),
    )
    scores = _wide(x).sigmoid() if norm_type == 1 else _wide(x).softmax(-1)
    choice = scores.detach() if bias is None else scores.detach() + bias
    if group_count > 1:
        grouped = choice.unflatten(-1, (group_count, -1))
        best = grouped.amax(-1) if group_select_mode == 0 else grouped.topk(2, dim=-1)[0].sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(k_group, dim=-1)[1], True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)
    experts = choice.topk(k, dim=-1)[1]
    weights = scores.gather(-1, experts)
    if norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    out = scores if out_flag else scores.new_empty(0)
    return (weights * routed_scaling_factor).to(x.dtype), experts.int(), out
