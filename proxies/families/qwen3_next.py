"""Qwen3-Next (Qwen3NextForCausalLM): layers with linear attention among those with full attention, shared expert."""

from __future__ import annotations

from proxies.families._layout import TINY, standard

LINEAR = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
FAMILY = standard("qwen3_next", tiny=TINY | LINEAR | {"num_experts": 8, "shared_expert_intermediate_size": 16})
