from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

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
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": 8,
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


def test_original_json_says_what_came_of_the_recipe(tmp_path: Path) -> None:
    facts = json.loads((ensure_original(MICRO, tmp_path) / "original.json").read_text(encoding="utf-8"))
    assert OriginalRecipe.model_validate(facts["recipe"]) == MICRO
    assert set(facts["ability"]) == {"1.0", "0.8", "0.0"}
    assert all(0 <= score["exact"] <= score["reward"] <= 1 for score in facts["ability"].values())
    least, most = facts["expert_share"]["least"], facts["expert_share"]["most"]
    assert len(least) == len(most) == 2
    assert all(0 <= low <= 1 <= high <= 8 / 2 for low, high in zip(least, most, strict=True))
    assert facts["seconds"] > 0
    assert f"torch {torch.__version__.split('+')[0]}" in " ".join(facts["versions"])


def test_balance_by_hand() -> None:
    even = torch.zeros(4, 4)
    first = torch.tensor([[100.0, 0.0, 0.0, 0.0]] * 4)
    second = torch.tensor([[0.0, 100.0, 0.0, 0.0]] * 4)
    mask = torch.ones(1, 4)
    assert originals.balance((even,), mask, 1).item() == pytest.approx(1.0)
    assert originals.balance((even,), mask, 2).item() == pytest.approx(2.0)
    assert originals.balance((first,), mask, 1).item() == pytest.approx(4.0)  # one of four experts does it all
    assert originals.balance((first, second), mask, 1).item() == pytest.approx(4.0)  # layers do not make up
    padded = torch.cat([first[:2], second[:2]])
    assert originals.balance((padded,), torch.tensor([[1, 1, 0, 0]]), 1).item() == pytest.approx(4.0)
    assert originals.balance((padded,), mask, 1).item() == pytest.approx(2.0)  # two of four, half each


def test_balance_of_one_layer_is_the_loss_of_the_model() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 6, dtype=torch.int64)
    mask[1, 3:] = 0
    theirs = load_balancing_loss_func((logits,), 8, 2, mask)
    torch.testing.assert_close(originals.balance((logits,), mask, 2), theirs)


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


def test_a_recipe_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(MICRO.model_dump_json(), encoding="utf-8")  # JSON is YAML
    assert load_recipe(str(file)) == MICRO
    with pytest.raises(UsageError, match=r"other\.yaml does not exist"):
        load_recipe(str(tmp_path / "other.yaml"))
    file.write_text("name: [", encoding="utf-8")
    with pytest.raises(UsageError, match=r"mine\.yaml is not valid YAML.*line 1"):
        load_recipe(str(file))
    file.write_text(json.dumps({**MICRO.model_dump(), "step": 3}), encoding="utf-8")
    with pytest.raises(UsageError, match="did you mean 'steps'"):
        load_recipe(str(file))


@pytest.mark.parametrize(
    ("key", "says"),
    [("num_expert", "did you mean 'architecture.num_experts'"), ("vocab_size", "not the recipe's to set")],
)
def test_a_misspelt_or_reserved_key_of_the_architecture_is_refused(key: str, says: str) -> None:
    recipe = MICRO.model_copy(update={"architecture": {**MICRO.architecture, key: 4}})
    with pytest.raises(UsageError, match=says):
        originals.train(recipe, lambda *_: None)


def test_the_correction_bias_moves_towards_an_even_load() -> None:
    bias = torch.tensor([0.0, 0.5, -0.5, 0.0])
    originals._nudge_bias(bias, torch.tensor([[0, 1], [0, 1], [0, 2], [0, 3]]), 0.1)
    # Loads 4, 2, 1, 1 with a mean of 2: too many, even, too few, too few.
    assert bias.tolist() == pytest.approx([-0.1, 0.5, -0.4, 0.1])


def test_a_bias_rate_without_a_bias_is_refused() -> None:
    with pytest.raises(UsageError, match="bias_rate is set, but qwen3_moe has no bias to correct"):
        originals.train(MICRO.model_copy(update={"bias_rate": 0.01}), lambda *_: None)


def test_a_bias_rate_fills_the_bias_of_every_router() -> None:
    recipe = load_recipe("tiny-deepseek-v3").model_copy(update={"steps": 2, "batch_size": 4, "warmup_steps": 1})
    model, _ = originals.train(recipe, lambda *_: None)
    biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3
    for bias in biases:
        steps = (bias / recipe.bias_rate).round()
        assert torch.allclose(bias, steps * recipe.bias_rate)
        assert 0 < steps.abs().max() <= 2
