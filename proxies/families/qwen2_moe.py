"""Qwen2-MoE (Qwen2MoeForCausalLM): shared expert with a gate of its own."""

from __future__ import annotations

from proxies.families._layout import TINY, standard

FAMILY = standard("qwen2_moe", tiny=TINY | {"num_experts": 8, "shared_expert_intermediate_size": 16})
