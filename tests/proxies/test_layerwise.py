"""Running layer by layer gives what the whole model gives, for architectures that differ in layout and layers."""

import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from proxies.checkpoint import Checkpoint, CheckpointError
from proxies.layerwise import Landing, Layerwise
from proxies.profile import profile
from proxies.profile_whole import profile_whole
from proxies.weights import dequantised

BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
ARCHITECTURES = {
    "qwen3_moe": {"num_experts": 8},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 16},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "gpt_oss": {"num_local_experts": 8, "sliding_window": 4},
    "granitemoe": {"num_local_experts": 8},
    "deepseek_v3": MLA,
    "glm4_moe": {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 2},
    "qwen3_next": {
        "num_experts": 8,
        "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention"] * 2 + ["full_attention"],
    },
}


def save(folder: Path, model_type: str, **changes) -> Path:
    config = AutoConfig.for_model(model_type, **{**BASE, **ARCHITECTURES[model_type], **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "bias" in name:
                torch.nn.init.normal_(tensor, std=0.1)
        model.save_pretrained(folder)
    return folder


def batches(count=3):
    made = []
    for number in range(count):
        tokens = torch.randint(1, 64, (2, 7 + number), generator=torch.Generator().manual_seed(number))
        mask = torch.ones_like(tokens)
        mask[0, :number] = 0
        made.append((tokens, mask))
    return made


def whole_logits(folder, given):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        return [model(input_ids=t, attention_mask=m, use_cache=False).logits for t, m in given]


def layerwise_logits(folder, given, **options):
    found = {}
    runner = Layerwise(Checkpoint.open(folder), **options)
    runner.run(given, logits=lambda number, logits: found.__setitem__(number, logits))
    assert all(p.is_meta for p in runner.model.parameters())
    return [found[n] for n in range(len(given))]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_logits_are_those_of_the_whole_model(tmp_path, model_type):
    folder, given = save(tmp_path / "model", model_type), batches()
    for ours, theirs in zip(layerwise_logits(folder, given), whole_logits(folder, given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_tied_embeddings_and_states_on_disk(tmp_path):
    folder, given = save(tmp_path / "model", "qwen3_moe", tie_word_embeddings=True, hidden_size=512), batches(4)
    theirs = whole_logits(folder, given)
    for ours in (layerwise_logits(folder, given), layerwise_logits(folder, given, budget=0, scratch=tmp_path)):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert list(tmp_path.glob(".states*")) == []


def test_one_layer_in_memory_at_a_time(tmp_path):
    folder = save(tmp_path / "model", "qwen3_moe")
    runner = Layerwise(Checkpoint.open(folder))
    seen = []

    class Visit:
        def __init__(self, layer, module):
            self.layer, self.module = layer, module

        def __enter__(self):
            loaded = {n.split(".")[2] for n, p in runner.model.named_parameters() if not p.is_meta and "layers" in n}
            seen.append((self.layer, loaded, runner.model.get_input_embeddings().weight.is_meta))

        def __exit__(self, *_):
            return None

    runner.run(batches(), Visit)
    assert seen == [(i, {str(i)}, True) for i in range(3)]


@pytest.mark.parametrize("model_type", ["qwen3_moe"])
def test_profile_equals_that_of_the_whole_model(tmp_path, model_type):
    folder, given = save(tmp_path / "model", model_type), batches()
    ours, theirs = profile(folder, given), profile_whole(folder, given)
    assert (ours.tokens, ours.calibration) == (theirs.tokens, theirs.calibration)
    assert set(ours.layers) == set(theirs.layers) == {0, 1, 2}
    for layer, expected in theirs.layers.items():
        for name in ("router", "frequency", "weight", "coactivation", "context", "saliency"):
            torch.testing.assert_close(
                getattr(ours.layers[layer], name), getattr(expected, name), rtol=1e-5, atol=1e-5, check_dtype=False
            )


def test_an_interrupted_profile_goes_on_at_the_layer_it_had_reached(tmp_path):
    folder, given, work = save(tmp_path / "model", "qwen3_moe"), batches(), tmp_path / "work"
    work.mkdir()
    expected = profile(folder, given)

    def stop(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile(folder, given, stop, work=work)
    assert Landing(work).layer == 2
    assert len(list(work.glob("states-2-*.safetensors"))) == len(list(work.glob("states-*"))) == 3
    layers = []
    again = profile(folder, given, lambda done, total: layers.append((done, total)), work=work)
    assert layers == [(3, 3)]
    for layer, theirs in expected.layers.items():
        assert torch.equal(again.layers[layer].context, theirs.context)
        assert torch.equal(again.layers[layer].saliency, theirs.saliency)
    assert threading.active_count() == 1


def test_a_failing_observer_leaves_no_thread_behind(tmp_path):
    folder = save(tmp_path / "model", "qwen3_moe")

    def visit(layer, module):
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        Layerwise(Checkpoint.open(folder)).run(batches(), visit)
    assert threading.active_count() == 1


def test_not_a_number_is_found_when_its_layer_is_loaded(tmp_path):
    folder = save(tmp_path / "model", "qwen3_moe")
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors[name][2, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name} holds 1 values that are NaN or infinite"):
        profile(folder, batches())


@pytest.mark.parametrize(("shape", "block"), [((256, 384), 128), ((200, 130), 128), ((8, 6), 4)])
def test_fp8_blocks_are_multiplied_by_their_own_scale(shape, block):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    rows, columns = (-(-n // block) for n in shape)
    scale = torch.rand(rows, columns, generator=generator) + 0.5
    expected = weight.float().clone()
    for i in range(shape[0]):
        for j in range(shape[1]):
            expected[i, j] *= scale[i // block, j // block]
    assert torch.equal(dequantised(weight, scale, block), expected)


def test_topk_mass_is_the_softmax_mass_of_the_chosen_experts(tmp_path):
    folder, given = save(tmp_path / "model", "qwen3_moe"), batches()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    masses = [[] for _ in range(3)]
    with torch.no_grad():
        for tokens, mask in given:
            out = model(input_ids=tokens, attention_mask=mask, output_router_logits=True)
            for layer, logits in enumerate(out.router_logits):
                masses[layer].append(logits[mask.reshape(-1).bool()].softmax(-1).topk(2).values.sum(-1))
    expected = [float(torch.cat(m).mean()) for m in masses]
    found = profile(folder, given)
    assert [found.topk_mass[i] for i in range(3)] == pytest.approx(expected, abs=1e-5)
    assert found.smallest_for_mass(2) == -int(-2 / (sum(expected) / 3) // 1)
    found.save(tmp_path / "profile.safetensors")
    assert type(found).load(tmp_path / "profile.safetensors").topk_mass == found.topk_mass


def test_profile_of_weights_alone(tmp_path):
    from safetensors.torch import load_file

    from proxies.profile_of_weights import profile_of_weights

    folder = save(tmp_path / "model", "qwen3_moe")
    tensors = load_file(folder / "model.safetensors")
    found = profile_of_weights(Checkpoint.open(folder))
    assert (found.tokens, found.calibration, found.topk_mass) == (0, "none", {})
    prefix = "model.layers.1.mlp"
    names = ("gate_proj", "up_proj", "down_proj")
    norms = [[float(tensors[f"{prefix}.experts.{e}.{n}.weight"].double().norm()) for n in names] for e in range(8)]
    geometric = torch.tensor(norms).double().prod(1) ** (1 / 3)
    router = tensors[f"{prefix}.gate.weight"].double()
    torch.testing.assert_close(found.layers[1].saliency, geometric * router.norm(dim=1), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.layers[1].router, router)


def test_model_that_hides_its_layers_is_loaded_as_a_whole(tmp_path, monkeypatch):
    from transformers import Qwen3MoeForCausalLM, Qwen3MoePreTrainedModel

    folder, given = save(tmp_path / "model", "qwen3_moe"), batches()
    expected, notes = profile(folder, given), []
    for kind in (Qwen3MoeForCausalLM, Qwen3MoePreTrainedModel):
        monkeypatch.setattr(kind, "_no_split_modules", None)
    found = profile(folder, given, note=notes.append)
    (note,) = notes
    assert "does not say which of its modules are its decoder layers" in note
    assert "The whole model is loaded instead, which takes 0.0 GB and more" in note
    for layer, theirs in expected.layers.items():
        torch.testing.assert_close(found.layers[layer].saliency, theirs.saliency, rtol=1e-5, atol=1e-6)
