"""Granite MoE (GraniteMoeForCausalLM): experts fused on disk."""

from __future__ import annotations

from proxies.families._layout import TINY, standard

FAMILY = standard(
    "granitemoe",
    block="block_sparse_moe",
    router="router",
    disk_router="router.layer.weight",
    fused=r"(input|output)_linear\.weight",
    count_keys=("num_local_experts",),
    tiny=TINY | {"num_local_experts": 8},
)
