"""DeepSeek-V3 (DeepseekV3ForCausalLM): as V2, with a sigmoid router, a correction bias, and groups ranked by two."""

from __future__ import annotations

from proxies.families._layout import TINY_MLA, standard

FAMILY = standard(
    "deepseek_v3",
    disk_rows=r"gate\.e_score_correction_bias",
    count_keys=("n_routed_experts",),
    group_keys=("n_group", "topk_group"),
    group_top=2,
    scoring="sigmoid",
    tiny=TINY_MLA,
)
