"""Mixtral (MixtralForCausalLM)."""

from __future__ import annotations

from proxies.families._layout import TINY, standard

FAMILY = standard(
    "mixtral", disk_block="block_sparse_moe", count_keys=("num_local_experts",), tiny=TINY | {"num_local_experts": 8}
)
