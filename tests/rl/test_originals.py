from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.rl import originals
from harness.rl.originals import OriginalRecipe, ensure_original, load_recipe

MICRO = OriginalRecipe(
    name="micro",
    model_type="qwen3_moe",
    architecture={
        "hidden_size": 16,
        "intermediate_size": 16,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    steps=12,
    batch_size=16,
    lr=1e-2,
    warmup_steps=2,
    aux_coef=0.03,
)


def sha(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_training_twice_gives_the_same_bytes_and_learns(tmp_path: Path) -> None:
    losses: list[float] = []
    first = ensure_original(MICRO, tmp_path / "a", lambda _step, _total, loss: losses.append(loss))
    second = ensure_original(MICRO, tmp_path / "b")
    assert sha(first) == sha(second)
    assert len(losses) == MICRO.steps
    assert losses[-1] < 0.9 * losses[0]
    other = ensure_original(MICRO.model_copy(update={"seed": 1}), tmp_path / "a")
    assert sha(other) != sha(first)


def test_a_cached_original_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ensure_original(MICRO, tmp_path)
    monkeypatch.setattr(originals, "train", lambda *_: pytest.fail("trained again"))
    assert ensure_original(MICRO, tmp_path) == folder


def test_interrupted_training_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(step: int, _total: int, _loss: float) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_original(MICRO, tmp_path, interrupt)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_a_process_that_was_slower_takes_the_other_ones_result(tmp_path: Path) -> None:
    folder = ensure_original(MICRO, tmp_path)
    twin = folder.with_name("twin")
    twin.mkdir()
    (twin / "config.json").write_text("{}", encoding="utf-8")
    originals._publish(twin, folder)
    assert (folder / "model.safetensors").exists()


def test_default_recipe_is_valid_and_unknown_names_get_a_suggestion() -> None:
    recipe = load_recipe("tiny-qwen3-moe")
    assert recipe.architecture["num_experts"] == 64
    assert recipe.architecture["num_experts_per_tok"] == 4
    with pytest.raises(UsageError, match="did you mean 'tiny-qwen3-moe'"):
        load_recipe("tiny-qwen3")
    with pytest.raises(UsageError, match="no_such_type"):
        originals.train(MICRO.model_copy(update={"model_type": "no_such_type"}), lambda *_: None)
