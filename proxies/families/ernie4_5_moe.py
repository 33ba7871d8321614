"""ERNIE 4.5 (Ernie4_5_MoeForCausalLM): shared experts, a correction bias of one row beside the router."""

from __future__ import annotations

from proxies.families._layout import TINY, standard

FAMILY = standard(
    "ernie4_5_moe",
    disk_columns=r"moe_statics\.e_score_correction_bias",
    count_keys=("moe_num_experts",),
    top_k_key="moe_k",
    tiny=TINY | {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 1},
)
