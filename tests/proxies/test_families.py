"""Every family: pruned on disk, loaded by transformers, equal to the original with the other experts masked out."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from proxies.build import build
from proxies.checkpoint import Checkpoint, CheckpointError
from proxies.conformance import check_family, save_tiny
from proxies.cuts import check_request, cuts
from proxies.families import families, family_of, family_of_config
from proxies.profile import profile
from proxies.profile_of_weights import profile_of_weights
from proxies.profile_whole import profile_whole
from proxies.verify import check_loadable, verify

EXPECTED = {
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe",
    "hunyuan_v1_moe", "kimi_linear", "llama4_text", "longcat_flash", "minimax_m2", "mixtral", "olmoe", "phimoe",
    "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
}  # fmt: skip
each_family = pytest.mark.parametrize("model_type", sorted(families()))


def test_the_families_that_people_train_are_known():
    assert set(families()) >= EXPECTED


@each_family
def test_pruned_on_disk_is_the_masked_original(model_type, tmp_path):
    found = check_family(model_type, tmp_path)
    assert found.difference <= 1e-5
    assert found.effect > 100 * found.difference
    old, new = (
        load_file(tmp_path / "original" / "model.safetensors"),
        load_file(tmp_path / "proxy" / "model.safetensors"),
    )
    assert len(new) == found.tensors
    elements = {tensor.numpy().tobytes() for tensor in old.values()}
    experts = [n for n in new if re.fullmatch(family_of(model_type).expert_tensor, n)]
    assert all(new[n].numpy().tobytes() in elements for n in experts)  # whole experts, bit for bit


@each_family
def test_built_with_calibration_and_proven(model_type, tmp_path):
    family = family_of(model_type)
    save_tiny(family, tmp_path / "original")
    given = [(torch.randint(3, 60, (4, 9), generator=torch.Generator().manual_seed(s)), None) for s in range(2)]
    if model_type == "llama4_text":
        with pytest.raises(CheckpointError, match=r"Llama4TextExperts is not called with .* needs no calibration"):
            build(tmp_path / "original", tmp_path / "proxy", 4, given)
        build(tmp_path / "original", tmp_path / "proxy", 4, None)
    else:
        build(tmp_path / "original", tmp_path / "proxy", 4, given)
        ours, theirs = profile(tmp_path / "original", given), profile_whole(tmp_path / "original", given)
        for layer, expected in theirs.layers.items():
            for name in ("frequency", "weight", "context", "saliency"):
                torch.testing.assert_close(
                    getattr(ours.layers[layer], name), getattr(expected, name), rtol=1e-5, atol=1e-5
                )
    assert verify(tmp_path / "proxy", against=tmp_path / "original").compared > 0


@each_family
def test_built_by_the_weights_alone(model_type, tmp_path):
    family = family_of(model_type)
    save_tiny(family, tmp_path / "original")
    manifest = build(tmp_path / "original", tmp_path / "proxy", 4, None)
    count = family.experts(Checkpoint.open(tmp_path / "original").config)
    assert all(max(kept) < count for kept in manifest["kept_experts"].values())  # none that computes nothing


@pytest.mark.parametrize("model_type", ["deepseek_v3", "mixtral"])
def test_topk_mass_is_said_of_softmax_routers_only(model_type, tmp_path):
    family = family_of(model_type)
    save_tiny(family, tmp_path)
    found = profile(tmp_path, [(torch.randint(3, 60, (4, 9), generator=torch.Generator().manual_seed(0)), None)])
    assert (found.smallest_for_mass(2) is None) == (family.scoring == "sigmoid")


@pytest.mark.parametrize(
    ("model_type", "changes", "experts", "message"),
    [
        ("deepseek_v3", {}, 5, "5 is not a multiple of n_group = 2"),
        ("deepseek_v3", {}, 2, r"n_group = 2 groups are ranked by their 2 best experts, keep at least 4"),
        ("deepseek_v3", {"num_experts_per_tok": 3}, 4, "topk_group = 1 groups of 2 hold fewer than the 3 chosen"),
        ("deepseek_v2", {}, 8, "has 8, keep fewer"),
        ("mixtral", {}, 1, "num_experts_per_tok = 2 are chosen per token"),
    ],
)
def test_numbers_that_do_not_fit_the_router_are_refused(model_type, changes, experts, message, tmp_path):
    family = family_of(model_type)
    save_tiny(family, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        check_request(Checkpoint.open(tmp_path), family, experts)


def test_unknown_and_dense_models_are_refused():
    with pytest.raises(CheckpointError, match=r"'qwen3_mo' is not a known family; the nearest are: qwen3_moe"):
        family_of_config({"model_type": "qwen3_mo", "num_experts": 8})
    with pytest.raises(CheckpointError, match="'llama' is not a mixture-of-experts model"):
        family_of_config({"model_type": "llama", "hidden_size": 8})


def test_prediction_layers_after_the_last_are_left_out(tmp_path):
    save_tiny(family_of("deepseek_v3"), tmp_path / "original")
    path = tmp_path / "original" / "model.safetensors"
    tensors = load_file(path)
    last = {n.replace("layers.1.", "layers.2."): t.clone() for n, t in tensors.items() if "layers.1." in n}
    save_file(tensors | last | {"model.layers.2.eh_proj.weight": torch.zeros(2, 2)}, path, metadata={"format": "pt"})
    config = json.loads((tmp_path / "original" / "config.json").read_text())
    (tmp_path / "original" / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    build(tmp_path / "original", tmp_path / "proxy", 4, None)
    assert not any("layers.2." in n for n in load_file(tmp_path / "proxy" / "model.safetensors"))
    assert json.loads((tmp_path / "proxy" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_fp8_blocks_travel_with_their_experts_and_are_undone_for_the_profile(tmp_path):
    model = save_tiny(family_of("qwen3_moe"), tmp_path / "original")
    path = tmp_path / "original" / "model.safetensors"
    tensors, plain = load_file(path), {}
    for name in [n for n in tensors if ".experts." in n or "_proj." in n]:
        weight = tensors[name]
        scale = weight.abs().amax().reshape(1, 1) / 448
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = scale
        plain[name] = tensors[name].float() * scale
    save_file(tensors, path, metadata={"format": "pt"})
    given = [(torch.randint(3, 60, (4, 9), generator=torch.Generator().manual_seed(0)), None)]
    build(tmp_path / "original", tmp_path / "proxy", 4, given)
    kept = json.loads((tmp_path / "proxy" / "manifest.json").read_text())["kept_experts"]
    new = load_file(tmp_path / "proxy" / "model.safetensors")
    for layer, experts in kept.items():
        for position, expert in enumerate(experts):
            for leaf in ("weight", "weight_scale_inv"):
                mine = new[f"model.layers.{layer}.mlp.experts.{position}.down_proj.{leaf}"]
                theirs = tensors[f"model.layers.{layer}.mlp.experts.{expert}.down_proj.{leaf}"]
                assert mine.dtype == theirs.dtype
                assert torch.equal(mine.float(), theirs.float())
    for name, weight in plain.items():  # what the profile must have computed with
        tensors[name] = weight
        del tensors[name + "_scale_inv"]
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text((tmp_path / "original" / "config.json").read_text())
    save_file(tensors, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    weighed, expected = (profile_of_weights(Checkpoint.open(tmp_path / name)) for name in ("original", "plain"))
    for layer, other in expected.layers.items():  # by the weights alone: scales count, and are no experts' matrices
        torch.testing.assert_close(weighed.layers[layer].saliency, other.saliency, rtol=1e-6, atol=0)
    ours, theirs = profile(tmp_path / "original", given), profile(tmp_path / "plain", given)
    for layer, expected in theirs.layers.items():
        torch.testing.assert_close(ours.layers[layer].saliency, expected.saliency, rtol=1e-5, atol=1e-6)
    assert model is not None


def test_mxfp4_blocks_are_sliced_as_they_are(tmp_path):
    save_tiny(family_of("gpt_oss"), tmp_path / "original")
    path = tmp_path / "original" / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith("_proj")]:
        experts, rows, _ = tensors.pop(name).shape
        tensors[name + "_blocks"] = torch.randint(0, 256, (experts, rows, 1, 16), generator=generator).to(torch.uint8)
        tensors[name + "_scales"] = torch.randint(0, 256, (experts, rows, 1), generator=generator).to(torch.uint8)
    save_file(tensors, path, metadata={"format": "pt"})
    checkpoint = check_loadable(tmp_path / "original")
    kept = {0: [1, 3, 4, 7], 1: [0, 2, 5, 6]}
    family = family_of("gpt_oss")
    for cut in cuts(checkpoint, family, kept):
        if cut.name.endswith(("_blocks", "_scales")):
            layer = int(cut.name.split(".")[2])
            expected = tensors[cut.name][kept[layer]]
            assert cut.shape == tuple(expected.shape)
            assert b"".join(cut.chunks()) == expected.numpy().tobytes()
