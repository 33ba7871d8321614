"""Random Qwen3-MoE checkpoints of any size, written tensor by tensor."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from proxies.families import family_of

POOL = 4 << 20  # random values that all tensors are cut from


def config(layers: int, hidden: int, experts: int, inner: int, top_k: int = 4, vocab: int = 1024) -> dict[str, Any]:
    """Return a config.json for a Qwen3-MoE."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
        "hidden_size": hidden, "intermediate_size": inner, "moe_intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": max(hidden // 128, 1), "head_dim": 128,
        "num_key_value_heads": max(hidden // 1024, 1), "num_experts": experts, "num_experts_per_tok": top_k,
        "norm_topk_prob": True, "vocab_size": vocab, "tie_word_embeddings": False, "max_position_embeddings": 4096,
    }  # fmt: skip


def write(folder: Path, settings: dict[str, Any]) -> int:
    """Write a random bf16 checkpoint, one shard per layer; returns its size in bytes."""
    folder.mkdir(parents=True)
    values = np.random.default_rng(0).standard_normal(POOL, dtype=np.float32) * 0.05
    pool = (values.view(np.uint32) >> 16).astype(np.uint16)
    shards: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in family_of("qwen3_moe").shapes(settings):
        shards.setdefault(name.split(".")[2] if ".layers." in name else "rest", []).append((name, shape))
    weight_map, total = {}, 0
    for key, tensors in shards.items():
        file = f"model-{key}.safetensors"
        weight_map.update({name: file for name, _ in tensors})
        total += _write_shard(folder / file, tensors, pool)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(settings))
    return total


def _write_shard(path: Path, tensors: list[tuple[str, tuple[int, ...]]], pool: Any) -> int:
    header, offset = {}, 0
    for name, shape in tensors:
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number, (_, shape) in enumerate(tensors):
            left, start = int(np.prod(shape)), (number * 7919) % (POOL // 2)
            while left:
                part = pool[start : start + left]
                file.write(part.tobytes())
                left, start = left - len(part), 0
    return offset
