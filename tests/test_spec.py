from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from harness.errors import UsageError
from harness.spec import PairSpec, RLSpec, RunSpec, TaskSpec, load_pair, pair_names


def run_spec(**changes: object) -> RunSpec:
    values: dict[str, object] = {"weights": "w", "task": TaskSpec(), "rl": RLSpec(), "steps": 4, "seed": 0}
    return RunSpec.model_validate(values | changes)


def test_default_pair_is_package_data_and_valid() -> None:
    assert "tiny-qwen3-moe" in pair_names()
    pair = load_pair("tiny-qwen3-moe")
    assert pair.proxy.experts == 16
    assert pair.rl.updates_per_rollout == 4
    assert pair.rl.beta > 0


def test_key_depends_on_everything_that_decides_a_trace_and_on_the_code() -> None:
    base = run_spec()
    assert base.key("code") == run_spec().key("code")
    others = [
        base.key("other code"),
        run_spec(weights="v").key("code"),
        run_spec(seed=1).key("code"),
        run_spec(steps=5).key("code"),
        run_spec(mode="free").key("code"),
        run_spec(rl=RLSpec(lr=2e-4)).key("code"),
        run_spec(fault={"name": "noop"}).key("code"),
        run_spec(tape="t").key("code"),
    ]
    assert len({base.key("code"), *others}) == len(others) + 1


def test_specs_are_frozen_and_refuse_unknown_keys() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RLSpec().lr = 1.0
    with pytest.raises(ValueError, match="learning_rate"):
        RLSpec.model_validate({"learning_rate": 1.0})


def test_uneven_split_names_the_numbers() -> None:
    with pytest.raises(ValueError, match="15 sequences per step"):
        RLSpec(prompts_per_step=5, group_size=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [", "not valid YAML at line"),
        ("- a", "must be a mapping"),
        ("name: x\noriginal: {recipe: r}\nproxy: {experts: 4}\nrll: {}", "unknown key 'rll'; did you mean 'rl'"),
        ("name: x\noriginal: {recipe: r}\nproxy: {experts: 4}\nrl: {lrr: 1}", "did you mean 'rl.lr'"),
        ("name: x\noriginal: {recipe: r}\nproxy: {experts: 0}", "proxy.experts"),
        ("name: x\noriginal: {}\nproxy: {experts: 4}", "exactly one of recipe and folder"),
        ("name: x\noriginal: {recipe: r}\nproxy: {experts: 4}\nonset: 30", "onset 30"),
    ],
)
def test_bad_pair_file_is_refused_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message) as e:
        load_pair(str(path))
    assert "\n" not in str(e.value)
    assert e.value.exit_code == 2


def test_unknown_pair_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'tiny-qwen3-moe'"):
        load_pair("tiny-qwen-moe")
    with pytest.raises(UsageError, match="does not exist"):
        load_pair("/nowhere/pair.yaml")


def test_folders_in_a_pair_file_are_relative_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text(yaml.safe_dump({"name": "x", "original": {"folder": "a"}, "proxy": {"folder": "/b"}}), "utf-8")
    pair = load_pair(str(path))
    assert isinstance(pair, PairSpec)
    assert pair.original.folder == str(tmp_path / "a")
    assert pair.proxy.folder == "/b"
