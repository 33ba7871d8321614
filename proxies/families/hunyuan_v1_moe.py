"""Hunyuan-A13B (HunYuanMoEV1ForCausalLM): shared expert, router matrix one level below the gate."""

from __future__ import annotations

from proxies.families._layout import TINY, standard

FAMILY = standard(
    "hunyuan_v1_moe", disk_router="gate.wg.weight", top_k_key="moe_topk", tiny=TINY | {"num_experts": 8, "moe_topk": 2}
)
