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
    for outputs in (False, True):
        check_round_trip(profile(original, batches, outputs=outputs), tmp_path)


def check_round_trip(measured: Profile, tmp_path: Path) -> None:
    measured.save(tmp_path / "profile.safetensors")
    loaded = Profile.load(tmp_path / "profile.safetensors")
    assert loaded.calibration == measured.calibration
    assert loaded.tokens == measured.tokens
    for index, layer in measured.layers.items():
        for name, value in vars(layer).items():
            other = getattr(loaded.layers[index], name)
            assert other is value is None or torch.equal(other, value)


def test_outputs_equal_those_of_every_expert_on_every_token(original: Path, batches: Batches) -> None:
    from transformers import AutoModelForCausalLM

    layer = profile(original, batches, outputs=True).layers[0]
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32, experts_implementation="eager")
    block, states = model.model.layers[0].mlp, []
    block.register_forward_pre_hook(lambda _m, args: states.append(args[0]))
    with torch.no_grad():
        for tokens, mask in batches:
            model(input_ids=tokens, attention_mask=mask)
        x = torch.cat([s[m.bool()] for s, (_, m) in zip(states, batches, strict=True)])
        up = torch.einsum("nh,eih->nei", x, block.experts.gate_up_proj)
        gate, up = up.chunk(2, dim=-1)
        outputs = torch.einsum("nei,ehi->neh", F.silu(gate) * up, block.experts.down_proj)
        probs = (x @ block.gate.weight.T).softmax(-1)
    assert layer.mean_output is not None
    assert layer.output_norm is not None
    torch.testing.assert_close(layer.mean_output.float(), outputs.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.output_norm.float(), outputs.norm(dim=-1).mean(0), rtol=1e-4, atol=1e-5)
    # Fewer than 256 tokens: the sample holds all of them, in order.
    assert layer.sample_scores is not None
    assert layer.sample_outputs is not None
    assert layer.sample_target is not None
    torch.testing.assert_close(layer.sample_scores, probs, rtol=1e-4, atol=1e-6)
    routed = probs * torch.zeros_like(probs).scatter_(1, probs.topk(2).indices, 1.0)
    routed = routed / routed.sum(1, keepdim=True)
    target = torch.einsum("ne,nes->ns", routed, layer.sample_outputs)
    torch.testing.assert_close(layer.sample_target, target, rtol=1e-4, atol=1e-5)
    # One and the same linear map takes outputs to their sketches.
    flat, sketched = outputs.reshape(-1, outputs.shape[-1]).double(), layer.sample_outputs.reshape(-1, 32).double()
    solution = torch.linalg.lstsq(flat, sketched).solution
    torch.testing.assert_close(flat @ solution, sketched, rtol=1e-3, atol=1e-4)


def test_a_sigmoid_router_is_told_by_its_weights() -> None:
    from proxies.outputs import routing_scores

    generator = torch.Generator().manual_seed(0)
    router = torch.nn.Module()
    router.weight = torch.nn.Parameter(torch.randn(6, 4, generator=generator))
    router.register_buffer("e_score_correction_bias", torch.linspace(-1, 1, 6))
    states = torch.randn(9, 4, generator=generator)
    for scores in ((states @ router.weight.T).sigmoid(), (states @ router.weight.T).softmax(-1)):
        chosen = (scores + router.e_score_correction_bias).topk(2).indices
        weights = scores.gather(1, chosen)
        for given in (weights, 2.5 * weights / weights.sum(1, keepdim=True)):
            _, found, bias = routing_scores(router, states, chosen, given.detach())
            torch.testing.assert_close(found.float(), scores.detach())
            assert bias.tolist() == pytest.approx(router.e_score_correction_bias.tolist())


def test_no_calibration_text_is_refused(original: Path) -> None:
    with pytest.raises(CheckpointError, match="no calibration tokens"):
        profile(original, [])
