"""A tiny Qwen3-MoE with a dense layer, its calibration text, and its profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch


def save_model(folder: Path, **changes: Any) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "initializer_range": 0.5,
    }
    with torch.random.fork_rng():
        torch.manual_seed(3)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**(settings | changes))).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("moe") / "original")


@pytest.fixture(scope="session")
def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 24, (3, 4, 6), generator=generator)
    mask = torch.ones(3, 4, 6, dtype=torch.int64)
    mask[1, 2, 4:] = 0
    return [(t, m) for t, m in zip(tokens, mask, strict=True)]
