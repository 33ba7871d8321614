"""Qwen3.5-MoE, text model (Qwen3_5MoeForCausalLM): as Qwen3-Next.

Folders of the whole vision-language model (`qwen3_5_moe`) are another architecture and not handled here.
"""

from __future__ import annotations

from proxies.families._layout import TINY, standard
from proxies.families.qwen3_next import LINEAR

FAMILY = standard("qwen3_5_moe_text", tiny=TINY | LINEAR | {"num_experts": 8, "shared_expert_intermediate_size": 16})
