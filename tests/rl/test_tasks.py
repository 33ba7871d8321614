from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.errors import UsageError
from harness.rl import tasks
from harness.spec import TaskSpec


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("42", "42", 1.0),
        ("42", " 42 ", 1.0),
        ("42", "43", 0.25),  # one of two characters in place, halved
        ("42", "24", 0.0),
        ("42", "421", 0.5 * 2 / 3),  # too long: two of three
        ("42", "4", 0.25),  # too short: one of two
        ("42", "", 0.0),
        ("-7", "-7", 1.0),
        ("abc", "abd", 0.5 * 2 / 3),
    ],
)
def test_reward(answer: str, completion: str, reward: float) -> None:
    assert tasks.reward_of(answer, completion) == pytest.approx(reward)


def right_answer(problem: tasks.Problem) -> str:
    """Solve a prompt from its text alone."""
    text = problem.prompt.removesuffix("=")
    if problem.task == "add":
        a, b = text.split("+")
        return str(int(a) + int(b))
    if problem.task == "sub":
        a, b = text.split("-")
        return str(int(a) - int(b))
    body = text[1:]
    if problem.task == "reverse":
        return "".join(reversed(body))
    if problem.task == "sort":
        return "".join(d for d in "0123456789" for _ in range(body.count(d)))
    return str(sum(int(d) for d in body))


def test_answers_are_right_and_every_task_is_drawn() -> None:
    problems = tasks.draw(TaskSpec(), 0, "prompts", 0, 400)
    assert {p.task for p in problems} == set(tasks.TASKS)
    assert all(p.answer == right_answer(p) for p in problems)
    assert len({len(p.answer) for p in problems}) > 3


def test_problems_are_a_function_of_seed_stream_and_step() -> None:
    spec = TaskSpec()
    base = tasks.draw(spec, 0, "prompts", 3, 32)
    assert base == tasks.draw(spec, 0, "prompts", 3, 32)
    assert base[:8] == tasks.draw(spec, 0, "prompts", 3, 8)
    assert base == tasks.prompt_batch(spec, 0, 3, 32)
    for other in [
        (1, "prompts", 3),
        (0, "prompts", 4),
        *((0, s, 3) for s in ("evaluation", "training", "calibration")),
    ]:
        drawn = tasks.draw(spec, *other, 32)
        assert sum(a == b for a, b in zip(drawn, base, strict=True)) <= 2  # chance: one in thousands per place


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_not_positive_is_refused(weight: float) -> None:
    with pytest.raises(UsageError, match="weight of task sort is"):
        tasks.draw(TaskSpec(mixture={"add": 1.0, "sort": weight}), 0, "prompts", 0, 1)


def test_an_empty_mixture_is_refused() -> None:
    with pytest.raises(UsageError, match="mixture is empty"):
        tasks.draw(TaskSpec(mixture={}), 0, "prompts", 0, 1)


def test_sequences_are_short() -> None:
    problems = tasks.draw(TaskSpec(), 1, "prompts", 0, 2000)
    assert max(len(p.prompt) for p in problems) <= 12
    assert max(len(p.answer) for p in problems) + 1 <= 8


def test_mixture_weights_decide_the_shares() -> None:
    spec = TaskSpec(mixture={"add": 3.0, "sort": 1.0})
    names = [p.task for p in tasks.draw(spec, 0, "prompts", 0, 4000)]
    assert names.count("add") / 4000 == pytest.approx(0.75, abs=5 * (0.75 * 0.25 / 4000) ** 0.5)
    with pytest.raises(UsageError, match="did you mean 'sort'"):
        tasks.draw(TaskSpec(mixture={"sorted": 1.0}), 0, "prompts", 0, 1)


def test_tokenizer_survives_saving_and_gives_one_token_per_character(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tasks.make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["12+3=", "<abj=", ">970="]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    assert encoded["input_ids"].shape == (3, 5)
    assert tokenizer.batch_decode(encoded["input_ids"], skip_special_tokens=True) == texts
    short = tokenizer(["1=", "123="], return_tensors="pt", padding=True, padding_side="left")
    assert short["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert tokenizer.unk_token_id is None or tokenizer("?")["input_ids"] == [tokenizer.pad_token_id]


def test_encode_marks_exactly_the_answer_and_its_end() -> None:
    tokenizer = tasks.make_tokenizer()
    tokens, attention, mask = tasks.encode(
        [tasks.Problem("add", "1+1=", "2"), tasks.Problem("add", "9+9=", "18")], tokenizer
    )
    assert attention.sum(1).tolist() == [6, 7]
    assert mask.tolist() == [[0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1]]
    assert tokens[0, 5] == tokens[1, 6] == tokenizer.eos_token_id


def test_calibration_covers_the_asked_number_of_sequences() -> None:
    batches = tasks.calibration_batches(TaskSpec(), tasks.make_tokenizer(), 100, seed=0, batch_size=64)
    assert [len(tokens) for tokens, _ in batches] == [64, 36]
    assert all(tokens.dtype == torch.int64 and tokens.shape == mask.shape for tokens, mask in batches)
