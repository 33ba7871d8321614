"""DeepSeek-V3.2 (DeepseekV32ForCausalLM): as V3, with an indexer for sparse attention."""

from __future__ import annotations

from proxies.families._layout import TINY_MLA, standard

FAMILY = standard(
    "deepseek_v32",
    disk_rows=r"gate\.e_score_correction_bias",
    count_keys=("n_routed_experts",),
    group_keys=("n_group", "topk_group"),
    group_top=2,
    scoring="sigmoid",
    tiny=TINY_MLA | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8},
)
