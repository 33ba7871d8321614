"""Exact parameter counts of MoE architectures from the values of config.json; nothing is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import UsageError

EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
FAMILIES = ("deepseek_v3", "deepseek_v32", "glm4_moe", "gpt_oss", "qwen3_moe")


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters by part, and how many routed experts there are and are used per token."""

    embedding: int
    head: int
    attention: int
    norms: int
    router: int
    dense: int
    shared: int
    experts: int
    count: int
    top_k: int

    @property
    def total(self) -> int:
        """All parameters; a tied head counts once, and buffers do not count."""
        always = self.embedding + self.head + self.attention + self.norms + self.router
        return always + self.dense + self.shared + self.experts

    @property
    def active(self) -> int:
        """Parameters that one token uses, the input embedding counted whole."""
        return self.total - self.experts * (self.count - self.top_k) // self.count

    @property
    def active_without_embedding(self) -> int:
        """Active parameters without an input embedding that is not also the head; some publishers count so."""
        return self.active - (self.embedding if self.head else 0)

    @property
    def experts_share(self) -> float:
        """Routed experts' share of the total."""
        return self.experts / self.total


def count_parameters(config: Mapping[str, Any]) -> Parameters:
    """Count the parameters of the architecture that a config describes, without multi-token-prediction layers.

    Args:
        config: Values of config.json of one of ``FAMILIES``.

    Raises:
        UsageError: If the family is not known, or a value is missing or not an integer in range.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UsageError(f"config.json: model_type {kind!r} has no cost model; known are {', '.join(FAMILIES)}")
    hidden, vocab, layers = (_positive(config, k) for k in ("hidden_size", "vocab_size", "num_hidden_layers"))
    key = next((k for k in EXPERT_KEYS if config.get(k) is not None), EXPERT_KEYS[0])
    count, top_k = _positive(config, key), _positive(config, "num_experts_per_tok")
    if top_k > count:
        raise UsageError(f"config.json: num_experts_per_tok {top_k} is more than {key} {count}")
    attention, norms = _latent(config, hidden) if kind.startswith("deepseek") else _grouped(config, hidden)
    moe = sum(_is_moe(config, layer) for layer in range(layers))
    oss = kind == "gpt_oss"
    inner = _positive(config, "intermediate_size" if oss else "moe_intermediate_size")
    expert = 3 * hidden * inner + (2 * inner + hidden if oss else 0)
    shared = 3 * hidden * inner * int(config.get("n_shared_experts") or 0)
    dense = 3 * hidden * _positive(config, "intermediate_size") if moe < layers else 0
    return Parameters(
        embedding=vocab * hidden,
        head=0 if config.get("tie_word_embeddings", False) else vocab * hidden,
        attention=layers * attention,
        norms=layers * (norms + 2 * hidden) + hidden,
        router=moe * count * (hidden + oss),
        dense=(layers - moe) * dense,
        shared=moe * shared,
        experts=moe * count * expert,
        count=count,
        top_k=top_k,
    )


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"config.json: {key} = {value!r} where a positive integer is needed")
    return value


def _is_moe(config: Mapping[str, Any], layer: int) -> bool:
    if config["model_type"] == "qwen3_moe":
        step = int(config.get("decoder_sparse_step") or 1)
        return layer not in (config.get("mlp_only_layers") or []) and (layer + 1) % step == 0
    return layer >= int(config.get("first_k_dense_replace") or 0)


def _grouped(config: Mapping[str, Any], hidden: int) -> tuple[int, int]:
    """Return the parameters of grouped-query attention and of its norms, per layer."""
    heads, keys, dim = (_positive(config, k) for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    kind = config["model_type"]
    weights = 2 * hidden * heads * dim + 2 * hidden * keys * dim
    if config.get("attention_bias", False):
        weights += (heads + 2 * keys) * dim + (0 if kind == "glm4_moe" else hidden)
    if kind == "gpt_oss":
        weights += heads  # one attention sink per head
    normed = kind == "qwen3_moe" or bool(config.get("use_qk_norm", False))
    return weights, 2 * dim if normed else 0


def _latent(config: Mapping[str, Any], hidden: int) -> tuple[int, int]:
    """Return the parameters of multi-head latent attention (arXiv 2405.04434) and of its norms, per layer."""
    heads, q, kv = (_positive(config, k) for k in ("num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    nope, rope, v = (_positive(config, k) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    weights = hidden * q + q * heads * (nope + rope) + hidden * (kv + rope) + kv * heads * (nope + v)
    weights += heads * v * hidden
    norms = q + kv
    if config["model_type"] == "deepseek_v32":  # the indexer of sparse attention
        count, dim = _positive(config, "index_n_heads"), _positive(config, "index_head_dim")
        weights += q * count * dim + hidden * dim + hidden * count
        norms += 2 * dim
    return weights, norms
