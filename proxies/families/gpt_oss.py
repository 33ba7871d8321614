"""gpt-oss (GptOssForCausalLM): experts fused on disk, with biases; also as MXFP4 blocks and scales."""

from __future__ import annotations

from proxies.families._layout import TINY, standard

FAMILY = standard(
    "gpt_oss",
    router="router",
    disk_router="router.weight",
    disk_rows=r"router\.bias",
    fused=r"experts\.(gate_up_proj|down_proj)(_bias|_blocks|_scales)?",
    count_keys=("num_local_experts",),
    tiny=TINY | {"num_local_experts": 8, "sliding_window": 8},
)
