"""GLM-4.5 (Glm4MoeForCausalLM): sigmoid router with a correction bias, dense first layer, shared expert."""

from __future__ import annotations

from proxies.families._layout import TINY, standard

FAMILY = standard(
    "glm4_moe",
    disk_rows=r"gate\.e_score_correction_bias",
    count_keys=("n_routed_experts",),
    group_keys=("n_group", "topk_group"),
    group_top=2,
    scoring="sigmoid",
    tiny=TINY | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
)
