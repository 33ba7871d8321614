"""Phi-3.5-MoE (PhimoeForCausalLM): LayerNorms with biases, two experts picked one after the other."""

from __future__ import annotations

from proxies.families._layout import TINY, standard

FAMILY = standard(
    "phimoe",
    disk_block="block_sparse_moe",
    router="router",
    count_keys=("num_local_experts",),
    tiny=TINY | {"num_local_experts": 8},
)
