"""Sharded folders, damaged in every way that the reader must notice, and requests that do not fit a checkpoint."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from proxies.build import build
from proxies.checkpoint import INDEX, Checkpoint, CheckpointError, Cut, checkpoint_digest
from proxies.select import strategies
from proxies.verify import check_loadable, verify
from proxies.writer import write_checkpoint
from tests.proxies.conftest import save_model

Batches = list[tuple[torch.Tensor, torch.Tensor]]
Index = dict[str, Any]


@pytest.fixture(scope="module")
def sharded(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("sharded") / "bf16"
    AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="6KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def rewrite(shard: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard, metadata={"format": "pt"})


def lose_shard(folder: Path, index: Index, shards: list[str]) -> None:
    (folder / shards[1]).unlink()


def store_twice(folder: Path, index: Index, shards: list[str]) -> None:
    name, tensor = sorted(load_file(folder / shards[0]).items())[0]
    rewrite(folder / shards[1], lambda tensors: tensors.update({name: tensor}))


def lose_tensor(folder: Path, index: Index, shards: list[str]) -> None:
    rewrite(folder / shards[0], lambda tensors: tensors.pop(sorted(tensors)[0]))


def leave_out_of_index(folder: Path, index: Index, shards: list[str]) -> None:
    index["weight_map"].pop(sorted(index["weight_map"])[0])


def point_outside(folder: Path, index: Index, shards: list[str]) -> None:
    index["weight_map"][sorted(index["weight_map"])[0]] = "../model.safetensors"


def point_nowhere(folder: Path, index: Index, shards: list[str]) -> None:
    index["weight_map"][sorted(index["weight_map"])[0]] = 7


def drop_map(folder: Path, index: Index, shards: list[str]) -> None:
    del index["weight_map"]


def keep_stale_single_file(folder: Path, index: Index, shards: list[str]) -> None:
    shutil.copy(folder / shards[0], folder / "model.safetensors")


def cut_short(folder: Path, index: Index, shards: list[str]) -> None:
    (folder / shards[-1]).write_bytes((folder / shards[-1]).read_bytes()[:-1])


def overflow(folder: Path, index: Index, shards: list[str]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[sorted(tensors)[0]].view(-1)[:3] = torch.tensor([torch.inf, torch.nan, -torch.inf])

    rewrite(folder / shards[0], change)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lose_shard, r"lacks the shard model-00002-of-0000\d.safetensors, which .* names for \d+ tensors"),
        (store_twice, r"tensor \S+ is stored twice, in model-00001\S+ and model-00002"),
        (lose_tensor, r"model-00001\S+ lacks the tensor \S+, which model.safetensors.index.json places there"),
        (leave_out_of_index, r"holds the tensor \S+, which model.safetensors.index.json does not name"),
        (point_outside, r"is '../model.safetensors', which is not a plain file name"),
        (point_nowhere, r"is 7, which is not a plain file name"),
        (drop_map, r"has no weight_map"),
        (keep_stale_single_file, r"holds both model.safetensors and model.safetensors.index.json"),
        (cut_short, r"is truncated: \d+ bytes, where its header needs \d+"),
        (overflow, r"tensor \S+ holds 3 values that are NaN or infinite"),
    ],
)
def test_damaged_shards_are_named(
    sharded: Path,
    batches: Batches,
    tmp_path: Path,
    harm: Callable[[Path, Index, list[str]], None],
    message: str,
) -> None:
    bad = shutil.copytree(sharded, tmp_path / "bad")
    index = json.loads((bad / INDEX).read_text())
    harm(bad, index, sorted(set(index["weight_map"].values())))
    (bad / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        build(bad, tmp_path / "out", 4, batches)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad"]


def test_shards_in_bfloat16_are_cut_bit_for_bit(sharded: Path, batches: Batches, tmp_path: Path) -> None:
    manifest = build(sharded, tmp_path / "out", 4, batches)
    old: dict[str, torch.Tensor] = {}
    for shard in sharded.glob("*.safetensors"):
        old |= load_file(shard)
    new = load_file(tmp_path / "out" / "model.safetensors")
    for layer, kept in manifest["kept_experts"].items():
        for position, expert in enumerate(kept):
            name = f"model.layers.{layer}.mlp.experts.{{}}.down_proj.weight"
            assert new[name.format(position)].dtype == torch.bfloat16
            assert torch.equal(new[name.format(position)], old[name.format(expert)])
    assert manifest["parameters"]["original"] == sum(t.numel() for t in old.values())
    assert manifest["parameters"]["proxy"] == sum(t.numel() for t in new.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 10**12}, r"tensor model.layers.0.mlp.gate.weight has shape \[8, 16\], but .* \[1000"),
        ({"num_local_experts": 7}, r"tensor model.layers.0.mlp.gate.weight has shape \[8, 16\], but .* \[7, 16\]"),
        ({"num_hidden_layers": 10**12}, r"lacks the tensor model.layers.3.input_layernorm.weight \[16\]"),
        ({"mlp_only_layers": "1"}, r"mlp_only_layers = '1' where a list"),
        ({"decoder_sparse_step": 0}, r"decoder_sparse_step = 0 where a positive integer"),
        ({"hidden_size": -4}, r"hidden_size = -4 where a positive integer"),
        ({"model_type": None}, r"model_type = None where the name of an architecture"),
        ({"num_local_experts": None}, r"config.json has no num_local_experts"),
    ],
)
def test_config_that_does_not_fit_is_refused(
    original: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    bad = shutil.copytree(original, tmp_path / "bad")
    config = json.loads((bad / "config.json").read_text()) | changes
    (bad / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        check_loadable(bad)


def test_model_whose_layers_are_all_dense_is_refused(tmp_path: Path) -> None:
    dense = save_model(tmp_path / "dense", mlp_only_layers=[0, 1, 2])
    with pytest.raises(CheckpointError, match="leaves every layer dense"):
        check_loadable(dense)


def test_spare_tensors_are_carried_and_load_without_complaint(batches: Batches, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = save_model(tmp_path / "tied", tie_word_embeddings=True)
    spare = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= spare | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    rewrite(source / "model.safetensors", add)
    build(source, tmp_path / "out", 4, batches)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_tokenizer_travels_and_pickles_and_code_do_not(original: Path, batches: Batches, tmp_path: Path) -> None:
    source = shutil.copytree(original, tmp_path / "source")
    for name in ("tokenizer.json", "chat_template.jinja", "pytorch_model.bin", "optimizer.pt", "modeling.py"):
        (source / name).write_text("{}")
    manifest = build(source, tmp_path / "out", 4, batches)
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == expected | {"manifest.json"}
    assert set(manifest["files"]) == expected


def test_code_travels_where_the_configuration_refers_to_it(original: Path, batches: Batches, tmp_path: Path) -> None:
    source = shutil.copytree(original, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling_x.Model"}}))
    (source / "modeling_x.py").write_text("raise RuntimeError('never run')\n")
    build(source, tmp_path / "out", 4, batches)
    assert (tmp_path / "out" / "modeling_x.py").read_bytes() == (source / "modeling_x.py").read_bytes()


def tokens(*values: int) -> torch.Tensor:
    return torch.tensor([values])


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ([(tokens(1, 2), None), (tokens(3, 24), None)], "batch 1 holds the token 24, outside the vocabulary of 24"),
        ([(tokens(-1), None)], "batch 0 holds the token -1"),
        ([(tokens(1).float(), None)], r"batch 0 is torch.float32 \[1, 1\]"),
        ([(tokens(1, 2)[0], None)], r"batch 0 is torch.int64 \[2\]"),
        ([(tokens(1, 2), tokens(1))], r"batch 0 has tokens \[1, 2\], but a mask \[1, 1\]"),
        ([(tokens(1, 2), tokens(0, 0))], "no calibration tokens"),
    ],
)
def test_calibration_that_cannot_be_run_is_refused(
    original: Path, tmp_path: Path, calibration: Any, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        build(original, tmp_path / "out", 4, calibration)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": -1.0}, "weight of the router view is -1.0"),
        ({"context": float("nan")}, "weight of the context view is nan"),
        ({"router": 0, "coactivation": 0, "context": 0}, "weights of all views are zero"),
        ({"router": "x"}, "option router of strategy facility is 'x', but a float is needed"),
        ({"router": True}, "option router of strategy facility is True"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    original: Path, batches: Batches, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        build(original, tmp_path / "out", 4, batches, options=options)
    with pytest.raises(CheckpointError, match="seed -1 is negative"):
        build(original, tmp_path / "out", 4, batches, strategy_name="random", seed=-1)
    assert not list(tmp_path.iterdir())


def test_strategy_that_breaks_its_contract_is_refused(
    original: Path, batches: Batches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(layer: object, keep: int, *, seed: int, layer_index: int) -> list[int]:
        return [*range(1, keep), 8]

    monkeypatch.setitem(strategies(), "broken", broken)
    with pytest.raises(CheckpointError, match=r"strategy broken kept \[1, 2, 3, 8\] in layer 0"):
        build(original, tmp_path / "out", 4, batches, strategy_name="broken")
    assert not list(tmp_path.iterdir())


def test_options_are_recorded_with_their_defaults(original: Path, batches: Batches, tmp_path: Path) -> None:
    manifest = build(original, tmp_path / "out", 4, batches, options={"router": 2})
    assert manifest["options"] == {"router": 2.0, "coactivation": 1.0, "context": 1.0}
    spelled_out = {"router": 2.0, "coactivation": 1.0, "context": 1.0}
    assert build(original, tmp_path / "out", 4, batches, options=spelled_out) == manifest


def test_second_builder_waits_and_takes_what_the_first_has_made(
    original: Path, batches: Batches, tmp_path: Path
) -> None:
    waiting, second = threading.Event(), {}

    def build_too() -> None:
        tell = lambda what, _done, _all: waiting.set() if "waiting" in what else None  # noqa: E731
        second["manifest"] = build(original, tmp_path / "out", 4, batches, progress=tell)

    thread = threading.Thread(target=build_too)

    def meanwhile(what: str, done: int, total: int) -> None:
        if what == "profiling the layers" and done == 1:
            thread.start()
            assert waiting.wait(60)

    first = build(original, tmp_path / "out", 4, batches, progress=meanwhile)
    thread.join(60)
    assert second["manifest"] == first == json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_interrupted_build_goes_on_at_the_layer_and_the_shard_it_had_reached(
    original: Path, batches: Batches, tmp_path: Path
) -> None:
    expected = build(original, tmp_path / "expected", 4, batches, max_shard_bytes=4000)

    def stop_at(when: tuple[str, int]) -> Callable[[str, int, int], None]:
        def progress(what: str, done: int, total: int) -> None:
            if what == when[0] and done >= when[1]:
                raise KeyboardInterrupt

        return progress

    out = tmp_path / "out"
    for when in (("profiling the layers", 2), ("writing the proxy", 9000)):
        with pytest.raises(KeyboardInterrupt):
            build(original, out, 4, batches, max_shard_bytes=4000, progress=stop_at(when))
        assert not out.exists()
    shards = {p.name: p.stat().st_mtime_ns for p in (tmp_path / ".out.building" / "proxy").glob("*.safetensors")}
    assert len(shards) >= 2
    seen: list[tuple[str, int]] = []
    manifest = build(
        original, out, 4, batches, max_shard_bytes=4000, progress=lambda what, done, _all: seen.append((what, done))
    )
    assert manifest == expected
    assert [done for what, done in seen if what == "profiling the layers"] == []  # all three layers were done
    assert {name: (out / name).stat().st_mtime_ns for name in shards} == shards
    assert sorted(p.name for p in tmp_path.iterdir()) == ["expected", "out"]


def test_the_type_that_experts_were_watched_in_is_an_input(original: Path, batches: Batches, tmp_path: Path) -> None:
    manifest = build(original, tmp_path / "out", 4, batches, dtype=torch.bfloat16)
    assert manifest["profile_dtype"] == "torch.bfloat16"
    with pytest.raises(CheckpointError, match="already exists and is not this proxy"):
        build(original, tmp_path / "out", 4, batches)


def test_a_failing_check_ends_the_write(
    original: Path, batches: Batches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import proxies.writer

    def broken(_memory: object, _dtype: str) -> int:
        raise MemoryError("on purpose")

    monkeypatch.setattr(proxies.writer, "nonfinite_in", broken)
    monkeypatch.setattr(proxies.writer, "_WAITING", 1)
    with pytest.raises(MemoryError, match="on purpose"):
        build(original, tmp_path / "out", 4, batches)
    assert not (tmp_path / "out").exists()


def test_work_on_other_inputs_is_not_taken_up(original: Path, batches: Batches, tmp_path: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if what == "writing the proxy":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(original, tmp_path / "out", 4, batches, progress=stop)
    layers: list[int] = []
    tell = lambda what, done, _all: layers.append(done) if what == "profiling the layers" else None  # noqa: E731
    build(original, tmp_path / "out", 4, batches[:2], progress=tell)
    assert layers == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("files"), "has no list of files"),
        (lambda m: m.pop("kept_experts"), "does not list 4 kept experts for layer 0"),
        (lambda m: m["kept_experts"].pop("2"), "does not list 4 kept experts for layer 2"),
        (
            lambda m: m["kept_experts"].update({"0": m["kept_experts"]["0"][::-1]}),
            "differs from the part of the original",
        ),
        (lambda m: m["kept_experts"].update({"0": [0, 1, 2, 80]}), "does not list 4 kept experts for layer 0"),
        (lambda m: m.update(schema="other"), "has schema 'other'"),
    ],
)
def test_manifest_that_tells_another_story_does_not_verify(
    original: Path, batches: Batches, tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    build(original, tmp_path / "out", 4, batches)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    change(manifest)
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=message):
        verify(tmp_path / "out", against=original)


def test_digest_ignores_what_does_not_reach_the_model(original: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(original, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    reordered = dict(reversed(config.items())) | {"transformers_version": "0", "_name_or_path": "elsewhere"}
    (copy / "config.json").write_text(json.dumps(reordered))
    assert checkpoint_digest(copy) == checkpoint_digest(original)
    (copy / "config.json").write_text(json.dumps(reordered | {"rms_norm_eps": 1e-5}))
    assert checkpoint_digest(copy) != checkpoint_digest(original)


def test_shards_fill_up_to_the_size_asked_for(original: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(original)
    write_checkpoint(tmp_path, [Cut(n, i) for n, i in checkpoint.tensors.items()], checkpoint.config, 4000)
    shards = {p.name: load_file(p) for p in tmp_path.glob("*.safetensors")}
    assert all(sum(t.nbytes for t in s.values()) <= 4000 or len(s) == 1 for s in shards.values())
    old = load_file(original / "model.safetensors")
    assert sorted(n for s in shards.values() for n in s) == sorted(old)
    assert all(torch.equal(tensor, old[name]) for s in shards.values() for name, tensor in s.items())
