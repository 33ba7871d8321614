from __future__ import annotations

import json
import shutil
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from proxies.build import build
from proxies.checkpoint import Checkpoint, CheckpointError, Cut, checkpoint_digest
from proxies.families import family_of
from proxies.verify import check_loadable, verify
from proxies.writer import write_checkpoint
from tests.proxies.conftest import save_model

Batches = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def proxy(original: Path, batches: Batches, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("proxy") / "p4"
    build(original, out, 4, batches)
    return out


def test_proxy_equals_the_original_with_the_other_experts_masked_out(original: Path, proxy: Path) -> None:
    from transformers import AutoModelForCausalLM

    kept = {int(k): v for k, v in json.loads((proxy / "manifest.json").read_text())["kept_experts"].items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small, info = AutoModelForCausalLM.from_pretrained(proxy, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert small.config.num_experts == 4
    large = AutoModelForCausalLM.from_pretrained(original)
    for layer, experts in kept.items():
        dropped = [e for e in range(8) if e not in experts]

        def mask(module: Any, args: Any, dropped: list[int] = dropped) -> Any:
            logits = args[0].reshape(-1, 16) @ module.weight.T
            logits[:, dropped] = -torch.inf
            weights, chosen = logits.softmax(-1).topk(2)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        gate = large.model.layers[layer].mlp.gate
        gate.forward = lambda x, gate=gate, mask=mask: mask(gate, (x,))
    tokens = torch.randint(0, 24, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(small(tokens).logits, large(tokens).logits, rtol=1e-5, atol=1e-5)


def test_kept_tensors_are_the_originals_bit_for_bit(original: Path, proxy: Path) -> None:
    kept = {int(k): v for k, v in json.loads((proxy / "manifest.json").read_text())["kept_experts"].items()}
    old, new = load_file(original / "model.safetensors"), load_file(proxy / "model.safetensors")
    seen = 0
    for name, tensor in new.items():
        parts = name.split(".")
        if ".experts." in name:
            parts[5] = str(kept[int(parts[2])][int(parts[5])])
            assert torch.equal(tensor, old[".".join(parts)])
            seen += 1
        elif name.endswith("mlp.gate.weight"):
            assert torch.equal(tensor, old[name][kept[int(parts[2])]])
        else:
            assert torch.equal(tensor, old[name])
    assert seen == 2 * 4 * 3  # two layers with experts, four kept, three matrices each
    assert verify(proxy, against=original).compared == len(new)


def test_same_inputs_give_the_same_bytes_and_an_earlier_result_is_kept(
    original: Path, proxy: Path, batches: Batches, tmp_path: Path
) -> None:
    build(original, tmp_path / "again", 4, batches)
    names = sorted(p.name for p in proxy.iterdir())
    assert names == sorted(p.name for p in (tmp_path / "again").iterdir())
    assert all((proxy / n).read_bytes() == (tmp_path / "again" / n).read_bytes() for n in names)
    before = (proxy / "model.safetensors").stat().st_mtime_ns
    build(original, proxy, 4, batches)
    assert (proxy / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(CheckpointError, match="already exists and is not this proxy"):
        build(original, proxy, 5, batches)


def test_shards_and_index_hold_the_same_model(original: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(original)
    cuts = [Cut(name, info) for name, info in checkpoint.tensors.items()]
    write_checkpoint(tmp_path, cuts, checkpoint.config, max_shard_bytes=4000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in load_file(original / "model.safetensors").values())
    assert checkpoint_digest(tmp_path) == checkpoint_digest(original)
    for shard in set(index["weight_map"].values()):
        with safe_open(tmp_path / shard, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_digest_sees_one_changed_bit(original: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(original, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    assert checkpoint_digest(copy) == checkpoint_digest(original)
    name = next(iter(tensors))
    tensors[name].view(-1)[0] = torch.nextafter(tensors[name].view(-1)[0], torch.tensor(torch.inf))
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert checkpoint_digest(copy) != checkpoint_digest(original)


def damage(folder: Path, how: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(weights)
    settings = json.loads(config.read_text())
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    if how == "nan":
        tensors[name][2, 5] = torch.nan
    elif how == "missing":
        del tensors[name]
    elif how == "shape":
        tensors[name] = tensors[name][:, :7].contiguous()
    elif how == "extra":
        tensors["model.layers.0.mlp.experts.99.up_proj.weight"] = tensors[name].clone()
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-10])
        return
    elif how == "header":
        weights.write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
        return
    elif how == "gone":
        weights.unlink()
        return
    elif how == "pickle":
        weights.rename(folder / "pytorch_model.bin")
        return
    elif how == "json":
        config.write_text("{broken")
        return
    else:
        settings |= {"topk": {"num_experts_per_tok": 9}, "dense": {"model_type": "llama"}}.get(how, {})
        if how == "dense":
            settings = {
                k: v for k, v in settings.items() if "expert" not in k and "moe" not in k and "mlp_only" not in k
            }
        config.write_text(json.dumps(settings))
        return
    save_file(tensors, weights, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nan", r"model.safetensors: tensor model.layers.0.mlp.experts.3.up_proj.weight holds 1 values that are NaN"),
        ("missing", r"lacks the tensor model.layers.0.mlp.experts.3.up_proj.weight \[8, 16\]"),
        ("shape", r"has shape \[8, 7\], but config.json implies \[8, 16\]"),
        ("extra", r"experts.99.up_proj.weight is not part of the model"),
        ("truncated", r"model.safetensors is truncated: \d+ bytes"),
        ("header", r"not a safetensors file: its header would have"),
        ("gone", r"has neither model.safetensors nor"),
        ("pickle", r"holds only pickled weights"),
        ("json", r"not valid JSON .* line 1"),
        ("topk", r"num_experts_per_tok = 9, but there are 8 experts"),
        ("dense", r"'llama' is not a mixture-of-experts model"),
    ],
)
def test_bad_checkpoint_is_refused_in_one_sentence_and_nothing_is_written(
    original: Path, batches: Batches, tmp_path: Path, how: str, message: str
) -> None:
    bad = shutil.copytree(original, tmp_path / "bad")
    damage(bad, how)
    with pytest.raises(CheckpointError, match=message) as e:
        build(bad, tmp_path / "out", 4, batches)
    assert "\n" not in str(e.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad"]
    with pytest.raises(CheckpointError, match=message):
        check_loadable(bad)


@pytest.mark.parametrize(
    ("experts", "message"),
    [(1, "num_experts_per_tok = 2 are chosen per token"), (8, "has 8, keep fewer"), (9, "has 8, keep fewer")],
)
def test_impossible_number_of_experts_is_refused(
    original: Path, batches: Batches, tmp_path: Path, experts: int, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        build(original, tmp_path / "out", experts, batches)
    assert not (tmp_path / "out").exists()


def test_a_proxy_that_was_tampered_with_does_not_verify(original: Path, proxy: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(proxy, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="the hash differs"):
        verify(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks the file"):
        verify(copy)


def test_both_spellings_of_the_number_of_experts_survive(original: Path, batches: Batches, tmp_path: Path) -> None:
    spelled = shutil.copytree(original, tmp_path / "spelled")
    config = json.loads((spelled / "config.json").read_text())
    config.pop("num_local_experts", None)
    config["num_experts"] = 8
    (spelled / "config.json").write_text(json.dumps(config))
    build(spelled, tmp_path / "out", 4, batches)
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found["num_experts"] == 4
    assert "num_local_experts" not in found
    config["num_local_experts"] = 7
    (spelled / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="contradicts itself"):
        check_loadable(spelled)


def test_roles_and_parameter_groups_cover_the_model(original: Path) -> None:
    import re

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(original)
    family = family_of("qwen3_moe")
    for name, _ in model.named_parameters():
        assert sum(bool(re.fullmatch(p, name)) for p in family.param_groups.values()) == 1, name
    found = {role: [n for n, _ in model.named_modules() if re.fullmatch(p, n)] for role, p in family.roles.items()}
    assert {role: len(names) for role, names in found.items()} == {
        "router": 2,
        "experts": 2,
        "norm": 1 + 3 * 4,
        "attention": 3,
        "rotary": 1,
        "head": 1,
        "embedding": 1,
    }


def test_unknown_family_names_the_nearest(tmp_path: Path, original: Path) -> None:
    with pytest.raises(CheckpointError, match="nearest are: qwen3_moe"):
        family_of("qwen3_moes")
    tied = save_model(tmp_path / "tied", tie_word_embeddings=True, mlp_only_layers=[])
    assert "lm_head.weight" not in check_loadable(tied).tensors
