"""MiniMax-M2 (MiniMaxM2ForCausalLM): sigmoid router, correction bias at the block."""

from __future__ import annotations

from proxies.families._layout import TINY, standard

FAMILY = standard(
    "minimax_m2",
    disk_block="block_sparse_moe",
    disk_rows=r"e_score_correction_bias",
    count_keys=("num_local_experts",),
    scoring="sigmoid",
    tiny=TINY | {"num_local_experts": 8},
)
