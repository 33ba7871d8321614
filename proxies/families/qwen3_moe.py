"""Qwen3-MoE (Qwen3MoeForCausalLM).

On disk every expert has its own tensors; in memory transformers 5 fuses them into `gate_up_proj` [E, 2I, H] and
`down_proj` [E, H, I]. A layer is dense when `mlp_only_layers` lists it or `decoder_sparse_step` skips it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from proxies.checkpoint import CheckpointError
from proxies.families import Family, positive_int

_LAYER = r"model\.layers\.(?P<layer>\d+)"
_ANY = r"model\.layers\.\d+"
_COUNT_KEYS = ("num_experts", "num_local_experts")


def _is_moe(config: Mapping[str, Any], layer: int) -> bool:
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CheckpointError(f"config.json: mlp_only_layers = {dense!r} where a list of layer indices is needed.")
    return layer not in dense and (layer + 1) % positive_int(config, "decoder_sparse_step", 1) == 0


def _shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = positive_int(config, "hidden_size")
    vocab = positive_int(config, "vocab_size")
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings", False):
        yield "lm_head.weight", (vocab, hidden)
    for layer in range(positive_int(config, "num_hidden_layers")):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield from _attention(config, f"{prefix}.self_attn", hidden)
        if _is_moe(config, layer):
            experts = FAMILY.experts(config)
            inner = positive_int(config, "moe_intermediate_size")
            yield f"{prefix}.mlp.gate.weight", (experts, hidden)
            for expert in range(experts):
                yield from _feed_forward(f"{prefix}.mlp.experts.{expert}", hidden, inner)
        else:
            yield from _feed_forward(f"{prefix}.mlp", hidden, positive_int(config, "intermediate_size"))


def _attention(config: Mapping[str, Any], prefix: str, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    heads = positive_int(config, "num_attention_heads")
    if config.get("head_dim") is None and hidden % heads:
        raise CheckpointError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}.")
    dim = hidden // heads if config.get("head_dim") is None else positive_int(config, "head_dim")
    keys = positive_int(config, "num_key_value_heads", heads)
    yield f"{prefix}.q_norm.weight", (dim,)
    yield f"{prefix}.k_norm.weight", (dim,)
    for name, rows in {"q_proj": heads * dim, "k_proj": keys * dim, "v_proj": keys * dim, "o_proj": hidden}.items():
        yield f"{prefix}.{name}.weight", (rows, heads * dim if name == "o_proj" else hidden)
        if config.get("attention_bias", False):
            yield f"{prefix}.{name}.bias", (rows,)


def _feed_forward(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)


FAMILY = Family(
    model_type="qwen3_moe",
    expert_tensor=_LAYER + r"\.mlp\.experts\.(?P<expert>\d+)\..+",
    expert_rows=_LAYER + r"\.mlp\.gate\.weight",
    router_weight="model.layers.{layer}.mlp.gate.weight",
    count_keys=_COUNT_KEYS,
    top_k_key="num_experts_per_tok",
    shapes=_shapes,
    # A tied head that was written out, and the rotary frequencies of older versions of transformers.
    spare_tensors=r"lm_head\.weight|" + _ANY + r"\.self_attn\.rotary_emb\.inv_freq",
    roles={
        "router": _LAYER + r"\.mlp\.gate",
        "experts": _LAYER + r"\.mlp\.experts",
        "norm": rf"model\.norm|{_ANY}\.(input|post_attention)_layernorm|{_ANY}\.self_attn\.[qk]_norm",
        "attention": _ANY + r"\.self_attn",
        "rotary": r"model\.rotary_emb",
        "head": r"lm_head",
        "embedding": r"model\.embed_tokens",
    },
    param_groups={
        "router": _ANY + r"\.mlp\.gate\.weight",
        # The feed-forward weights of dense layers count here too, so that the groups cover the model.
        "experts": _ANY + r"\.mlp\.(experts\..+|(gate|up|down)_proj\.weight)",
        "attention": _ANY + r"\.self_attn\.[qkvo]_proj\.(weight|bias)",
        "norms": rf"model\.norm\.weight|{_ANY}\.(\w+_layernorm|self_attn\.[qk]_norm)\.weight",
        "embedding": r"(model\.embed_tokens|lm_head)\.weight",
    },
    tiny={
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
        "initializer_range": 0.3,
    },
)
