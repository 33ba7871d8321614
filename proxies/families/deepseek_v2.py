"""DeepSeek-V2 (DeepseekV2ForCausalLM): latent attention, shared experts, groups ranked by their best."""

from __future__ import annotations

from proxies.families._layout import TINY_MLA, standard

FAMILY = standard(
    "deepseek_v2",
    count_keys=("n_routed_experts",),
    group_keys=("n_group", "topk_group"),
    tiny=TINY_MLA | {"topk_method": "group_limited_greedy"},
)
