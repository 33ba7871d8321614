"""What most architectures have in common, so that a family is a few lines: names around one expert block per layer."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from proxies.checkpoint import CheckpointError
from proxies.families import NOTHING, Family

LAYER = r"model\.layers\.(?P<layer>\d+)"
ANY = r"model\.layers\.\d+"
_NORM = r".*norm[^.]*(\.\d+)?"

# A tied head that was written out, and the rotary frequencies of older versions of transformers.
SPARE = r"lm_head\.weight|" + ANY + r"\.self_attn\.rotary_emb\.inv_freq"

# A tiny model of any architecture: hidden size 32, two or three layers, eight experts.
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
# The same with multi-head latent attention, a dense first layer, a shared expert and two groups.
TINY_MLA = TINY | {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8,
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def standard(
    model_type: str,
    *,
    block: str = "mlp",
    disk_block: str | None = None,
    router: str = "gate",
    disk_router: str = "gate.weight",
    disk_rows: str = NOTHING,
    disk_columns: str = NOTHING,
    fused: str = NOTHING,
    tiny: Mapping[str, Any],
    **changes: Any,
) -> Family:
    """A family whose layers have one expert block each.

    Args:
        model_type: as in config.json.
        block: name of the block in memory, below a layer; its experts are the module `experts`.
        disk_block: its name on disk; the same if None.
        router: name of the router module in memory, below the block.
        disk_router: name of the router matrix on disk, below the block.
        disk_rows: further tensors on disk with a row per expert, below the block, as a regular expression.
        disk_columns: tensors [1, E] on disk, below the block, as a regular expression.
        fused: tensors on disk that hold all experts along their first dimension, below the block.
        tiny: see `Family`.
        changes: any other field of `Family`.
    """
    disk = disk_block or block
    inside, outside = rf"{ANY}\.{block}", rf"(?!{_NORM}\.)(?!{ANY}\.{block}\.{router}\.)"
    fields: dict[str, Any] = {
        "model_type": model_type,
        "expert_tensor": NOTHING if fused != NOTHING else rf"{LAYER}\.{disk}\.experts\.(?P<expert>\d+)\..+",
        "expert_rows": rf"{LAYER}\.{disk}\.({re.escape(disk_router)}|{disk_rows}|{fused})",
        "expert_columns": rf"{LAYER}\.{disk}\.({disk_columns})",
        "router_weight": f"model.layers.{{layer}}.{disk}.{disk_router}",
        "count_keys": ("num_experts", "num_local_experts"),
        "top_k_key": "num_experts_per_tok",
        "shapes": shapes,
        "spare_tensors": SPARE,
        "roles": {
            "router": rf"{LAYER}\.{block}\.{router}",
            "experts": rf"{LAYER}\.{block}\.experts",
            "norm": rf"model\.norm|{ANY}\.{_NORM}",
            "attention": rf"{ANY}\.(self_attn|linear_attn)(\.\d+)?",
            "rotary": r"model\.rotary_emb",
            "head": r"lm_head",
            "embedding": r"model\.embed_tokens",
        },
        "param_groups": {
            "router": rf"{inside}\.({router}\..+|[^.]*bias[^.]*)",
            # The feed-forward weights of dense layers and shared experts count here too: the groups cover the model.
            "experts": rf"{outside}{ANY}\.({block}|mlps?)\..*(weight|_proj|_proj_bias)",
            "attention": rf"{outside}{ANY}\.(self_attn|linear_attn)\..+",
            "norms": rf"(model\.|{ANY}\.){_NORM}\.(weight|bias)",
            "embedding": r"(model\.embed_tokens|lm_head)\.weight",
        },
        "tiny": tiny,
    }
    return Family(**{**fields, **changes})


def shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor on disk, as transformers would write them; no memory is taken for weights.

    Raises:
        CheckpointError: transformers cannot build the model.
    """
    known = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    yield from _shapes(json.dumps(known, sort_keys=True))


@functools.lru_cache(maxsize=16)
def _shapes(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    config = json.loads(text)
    model_type = config.pop("model_type")
    try:
        built = AutoConfig.for_model(model_type, **config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(built, trust_remote_code=False)
    except Exception as error:  # configuration classes raise whatever their checks raise
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"config.json: transformers cannot build this {model_type} model ({what}).") from error
    tied = set(model.all_tied_weights_keys)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    on_disk = revert_weight_conversion(model, state)
    return tuple((name, tuple(tensor.shape)) for name, tensor in on_disk.items())
