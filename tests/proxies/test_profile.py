from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from proxies.checkpoint import CheckpointError
from proxies.profile import Profile, profile

Batches = list[tuple[torch.Tensor, torch.Tensor]]


def by_hand(folder: Path, batches: Batches) -> dict[int, dict[str, Any]]:
    """The same sums, token by token and expert by expert, from the hidden states before each expert layer."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    result: dict[int, dict[str, Any]] = {}
    for index in (0, 2):
        block = model.model.layers[index].mlp
        states: list[torch.Tensor] = []
        handle = block.register_forward_pre_hook(lambda _m, args, states=states: states.append(args[0]))
        experts = block.gate.weight.shape[0]
        sums: dict[str, Any] = {
            "frequency": torch.zeros(experts),
            "weight": torch.zeros(experts),
            "coactivation": torch.zeros(experts, experts),
            "context": torch.zeros(experts, 16),
            "saliency": torch.zeros(experts),
        }
        with torch.no_grad():
            for tokens, mask in batches:
                states.clear()
                model(input_ids=tokens, attention_mask=mask)
                for b in range(tokens.shape[0]):
                    for t in range(tokens.shape[1]):
                        if mask[b, t]:
                            add_token(block, states[0][b, t], sums)
        handle.remove()
        result[index] = sums
    return result


def add_token(block: Any, x: torch.Tensor, sums: dict[str, Any]) -> None:
    probs = (block.gate.weight @ x).softmax(-1)
    chosen = probs.argsort(descending=True)[:2].tolist()
    weights = {e: probs[e] / sum(probs[c] for c in chosen) for e in chosen}
    for e in chosen:
        gate, up = (block.experts.gate_up_proj[e] @ x).chunk(2)
        output = block.experts.down_proj[e] @ (F.silu(gate) * up)
        sums["frequency"][e] += 1
        sums["weight"][e] += weights[e]
        sums["context"][e] += weights[e] * x
        sums["saliency"][e] += weights[e] * output.norm()
        for other in chosen:
            sums["coactivation"][e, other] += 1


def test_sums_equal_those_taken_token_by_token(original: Path, batches: Batches) -> None:
    measured, expected = profile(original, batches), by_hand(original, batches)
    assert set(measured.layers) == {0, 2}  # layer 1 is dense
    assert measured.tokens == 3 * 4 * 6 - 2
    for index, sums in expected.items():
        for name, value in sums.items():
            torch.testing.assert_close(getattr(measured.layers[index], name).float(), value, rtol=1e-5, atol=1e-5)


def test_saved_profile_comes_back_bit_for_bit(original: Path, batches: Batches, tmp_path: Path) -> None:
    measured = profile(original, batches)
    measured.save(tmp_path / "profile.safetensors")
    loaded = Profile.load(tmp_path / "profile.safetensors")
    assert loaded.calibration == measured.calibration
    assert loaded.tokens == measured.tokens
    for index, layer in measured.layers.items():
        for name, value in vars(layer).items():
            assert torch.equal(getattr(loaded.layers[index], name), value)


def test_no_calibration_text_is_refused(original: Path) -> None:
    with pytest.raises(CheckpointError, match="no calibration tokens"):
        profile(original, [])
