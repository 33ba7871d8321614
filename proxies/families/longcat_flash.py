"""LongCat-Flash (LongcatFlashForCausalLM): two attentions and dense blocks per layer, experts that compute nothing."""

from __future__ import annotations

from proxies.families._layout import TINY_MLA, standard

FAMILY = standard(
    "longcat_flash",
    router="router",
    disk_router="router.classifier.weight",
    disk_rows=r"router\.e_score_correction_bias",
    count_keys=("n_routed_experts",),
    top_k_key="moe_topk",
    tiny=TINY_MLA
    | {"zero_expert_num": 2, "moe_topk": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "num_layers": 2},
)
