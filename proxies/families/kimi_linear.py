"""Kimi Linear (KimiLinearForCausalLM): linear attention, sigmoid router with a correction bias."""

from __future__ import annotations

from proxies.families._layout import TINY, standard

FAMILY = standard(
    "kimi_linear",
    disk_block="block_sparse_moe",
    disk_rows=r"gate\.e_score_correction_bias",
    top_k_key="num_experts_per_token",
    group_keys=("num_expert_group", "topk_group"),
    group_top=2,
    scoring="sigmoid",
    tiny=TINY
    | {"num_experts": 8, "num_experts_per_token": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    | {"v_head_dim": 8},
)
