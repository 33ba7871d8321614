"""Runs a whole model of transformers on the fused operators: its classes call them in place of the library's code."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from harness.errors import UsageError
from harness.rl.npu_ops.registry import Table

NAME = "harness_npu"  # in transformers' registries of attention and experts
ALWAYS = (
    "npu_rms_norm",
    "npu_swiglu",
    "npu_rotary_mul",
    "npu_fusion_attention",
    "npu_grouped_matmul",
    "npu_moe_token_permute",
    "npu_moe_token_unpermute",
)


@dataclass(frozen=True)
class Layout:
    """How a family names its classes.

    Attributes:
        prefix: Start of every class name.
        router: Rest of the router's class name.
        gating: ``softmax`` scores without groups, or ``sigmoid`` scores with groups and a correction bias.
    """

    prefix: str
    router: str
    gating: Literal["softmax", "sigmoid"]


LAYOUTS = {
    "qwen3_moe": Layout("Qwen3Moe", "TopKRouter", "softmax"),
    "mixtral": Layout("Mixtral", "TopKRouter", "softmax"),
    "deepseek_v3": Layout("DeepseekV3", "TopkRouter", "sigmoid"),
}


class _Fused(nn.Module):
    """Marks a class that runs on a table of operators, which lies in the attribute ``fused``."""

    fused: Table


class _Norm(_Fused):
    weight: Any
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fused["npu_rms_norm"](hidden_states, self.weight, epsilon=self.variance_epsilon)[0]
        return out


class _FeedForward(_Fused):
    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = torch.cat([self.gate_proj(x), self.up_proj(x)], dim=-1)
        out: torch.Tensor = self.down_proj(self.fused["npu_swiglu"](halves, dim=-1))
        return out


class _Attention(_Fused):
    """Finds the fused rotary embedding where the library's function was; attention itself goes by the registry."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        source = sys.modules[type(self).__module__]
        ours = {
            "apply_rotary_pos_emb": _rotary(self.fused),
            "apply_rotary_pos_emb_interleave": _interleaved(self.fused),
        }
        before = {name: getattr(source, name) for name in ours if hasattr(source, name)}
        for name in before:
            setattr(source, name, ours[name])
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name, function in before.items():
                setattr(source, name, function)


def _rotary(ops: Table) -> Any:
    def apply(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return tuple(ops["npu_rotary_mul"](x, cos, sin, rotary_mode="half") for x in (q, k))

    return apply


def _interleaved(ops: Table) -> Any:
    """Leaves dimensions in pairs where the library moves them into halves: scores do not depend on their order."""

    def pairs(x: torch.Tensor, unsqueeze_dim: int) -> torch.Tensor:
        return x[..., : x.shape[-1] // 2].repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim)

    def apply(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        position_ids: Any = None,
        unsqueeze_dim: int = 1,
    ) -> Any:
        cos, sin = pairs(cos, unsqueeze_dim), pairs(sin, unsqueeze_dim)
        return tuple(ops["npu_rotary_mul"](x, cos, sin, rotary_mode="interleave") for x in (q, k))

    return apply


class _SoftmaxRouter(_Fused):
    top_k: int
    hidden_dim: int
    weight: Any

    def forward(self, hidden_states: torch.Tensor) -> Any:
        logits = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        weights, experts, _ = self.fused["npu_moe_gating_top_k_softmax"](logits, None, self.top_k)
        if getattr(self, "norm_topk_prob", True):  # Mixtral has no such switch and always does
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, experts.long()


class _SigmoidRouter(_Fused):
    top_k: int
    hidden_dim: int
    weight: Any
    e_score_correction_bias: Any
    topk_group: int
    num_group: int
    routed_scaling_factor: float

    def forward(self, hidden_states: torch.Tensor) -> Any:
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        logits = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim).to(wide), self.weight.to(wide))
        weights, experts, _ = self.fused["npu_moe_gating_top_k"](
            logits,
            self.top_k,
            bias=self.e_score_correction_bias.to(logits.dtype),
            k_group=self.topk_group,
            group_count=self.num_group,
            group_select_mode=1,
            renorm=0,
            norm_type=1,
            routed_scaling_factor=self.routed_scaling_factor,
            eps=1e-20,
        )
        return logits, weights, experts.long()


def _attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float = 1.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for transformers' registry: ``[B, N, S, D]`` in, ``[B, S, N, D]`` out; a boolean mask, True is kept."""
    rows, columns = query.shape[-2], key.shape[-2]
    if attention_mask is not None:
        masked = ~attention_mask[..., :columns]
    else:
        masked = torch.ones(rows, columns, dtype=torch.bool, device=query.device).triu(columns - rows + 1)
    padding = query.shape[-1] - value.shape[-1]  # the operator takes one head dimension for all three
    out = module.fused["npu_fusion_attention"](
        query.contiguous(),
        key.contiguous(),
        nn.functional.pad(value, (0, padding)).contiguous(),
        query.shape[1],
        "BNSD",
        atten_mask=masked.contiguous(),
        scale=scaling,
        keep_prob=1.0 - dropout,
        inner_precise=2,  # left-padded rows attend to nothing
        sparse_mode=1,
    )[0]
    return out[..., : value.shape[-1]].transpose(1, 2).contiguous(), None


def _experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts for transformers' registry: ``[T, H]``, ``[T, K]``, ``[T, K]`` -> ``[T, H]``."""
    ops: Table = module.fused
    tokens, rows = ops["npu_moe_token_permute"](hidden_states, top_k_index.int())
    counts = top_k_index.flatten().bincount(minlength=module.num_experts)

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        matrices = weight.transpose(1, 2).contiguous()
        out: torch.Tensor = ops["npu_grouped_matmul"]([x], [matrices], group_list=counts, group_list_type=1)[0]
        return out

    inner = ops["npu_swiglu"](product(tokens, module.gate_up_proj), dim=-1)
    out: torch.Tensor = ops["npu_moe_token_unpermute"](
        product(inner, module.down_proj), rows, probs=top_k_weights.to(hidden_states.dtype)
    )
    return out


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_forward)


@functools.cache
def _class(kind: Any, base: Any) -> Any:
    made: type[Any] = type(f"Fused{base.__name__}", (kind, base), {"__module__": base.__module__})
    return made


def _layout(model: Any) -> Layout:
    config = model.config
    layout = LAYOUTS.get(config.model_type)
    if layout is None:
        raise UsageError(
            f"a {config.model_type} model cannot run on fused operators; known families: {', '.join(LAYOUTS)}"
        )
    if config.hidden_act != "silu":
        raise UsageError(f"the fused operators have no activation {config.hidden_act!r}; only silu")
    if layout.gating == "sigmoid" and not config.norm_topk_prob:
        raise UsageError("npu_moe_gating_top_k always renormalises sigmoid weights; norm_topk_prob must be true")
    return layout


def install(model: Any, ops: Table) -> None:
    """Make a model call the operators of a table; whoever changes an entry changes the model's next call.

    Args:
        model: A causal language model of transformers.
        ops: The table, as ``registry.table`` returns it.

    Raises:
        UsageError: If the model's family, activation or gating has no fused operators here.
    """
    layout = _layout(model)
    router = _SoftmaxRouter if layout.gating == "softmax" else _SigmoidRouter
    kinds: dict[str, type[Any]] = {
        "RMSNorm": _Norm,
        "MLP": _FeedForward,
        "Attention": _Attention,
        layout.router: router,
        "Experts": _Fused,
    }
    module: Any
    for module in model.modules():
        kind: Any = kinds.get(type(module).__name__.removeprefix(layout.prefix))
        if kind is not None:
            module.__class__ = _class(kind, module.__class__)
            vars(module)["fused"] = ops
    _register()
    model.set_attn_implementation(NAME)
    model.set_experts_implementation(NAME)


def remove(model: Any) -> None:
    """Undo ``install``, up to the names of the attention and experts implementations."""
    for module in model.modules():
        if isinstance(module, _Fused):
            del vars(module)["fused"]
            module.__class__ = type(module).__bases__[1]


def used_by(model: Any) -> tuple[str, ...]:
    """Return the operators that a model on fused operators calls."""
    gating = _layout(model).gating
    return (*ALWAYS, "npu_moe_gating_top_k_softmax" if gating == "softmax" else "npu_moe_gating_top_k")
