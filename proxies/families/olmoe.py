"""OLMoE (OlmoeForCausalLM)."""

from __future__ import annotations

from proxies.families._layout import TINY, standard

FAMILY = standard("olmoe", tiny=TINY | {"num_experts": 8})
