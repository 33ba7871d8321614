"""Llama 4, text model (Llama4ForCausalLM): experts fused on disk, shared expert, sigmoid weights.

Its experts are run on all tokens at once, so they cannot be profiled one by one: use a strategy without calibration.
"""

from __future__ import annotations

from proxies.families._layout import TINY, standard

FAMILY = standard(
    "llama4_text",
    block="feed_forward",
    router="router",
    disk_router="router.weight",
    fused=r"experts\.(gate_up_proj|down_proj)",
    count_keys=("num_local_experts",),
    scoring="sigmoid",
    tiny=TINY
    | {"num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 1}
    | {"no_rope_layers": [1, 0], "attention_chunk_size": 32},
)
