from __future__ import annotations

import math
from pathlib import Path

import pytest

from harness.rl import ability
from harness.rl.policy import Policy
from harness.rl.tasks import TASKS, draw
from harness.spec import SideSpec, TaskSpec


def test_summary_by_hand() -> None:
    result = ability.summarise(["add", "add", "sort", "sort"], [1.0, 0.25, 1.0, 1.0])
    assert result.exact == 0.75
    assert result.error == pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    assert result.reward == pytest.approx(3.25 / 4)
    assert result.per_task == {"add": 0.5, "sort": 1.0}


@pytest.mark.parametrize(
    ("original", "proxy", "chance", "says"),
    [
        (0.70, 0.40, 0.01, None),
        (0.70, 0.20, 0.01, "less than 30% of the original's 70.0%"),
        (0.05, 0.03, 0.02, "not clearly above chance"),  # bar: 0.02 + 5 sqrt(0.02 * 0.98 / 512) = 0.051
        (0.05, 0.052, 0.02, None),
        (0.02, 0.0, 0.0, "less than 30%"),
        (0.01, 0.009, 0.0, "not clearly above chance"),  # a chance of 0 is taken as 1/512: bar 0.0098
        (0.01, 0.010, 0.0, None),
    ],
)
def test_gate(original: float, proxy: float, chance: float, says: str | None) -> None:
    reason = ability.refusal({"original": original, "proxy": proxy, "chance": chance}, floor=0.3)
    assert (reason is None) == (says is None)
    assert says is None or says in str(reason)


def test_a_perfect_policy_scores_one_and_a_random_one_near_zero(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    policy = Policy.load(checkpoint, SideSpec())
    random = ability.score(policy, tokenizer, TaskSpec(), 1.0, n=64)
    assert random.exact < 0.1
    assert set(random.per_task) <= set(TASKS)
    assert random == ability.score(policy, tokenizer, TaskSpec(), 1.0, n=64)

    answers = iter(draw(TaskSpec(), 0, "evaluation", 0, 64))
    monkeypatch.setattr(ability.tasks, "reward_of", lambda answer, _text: float(next(answers).answer == answer))
    assert ability.score(policy, tokenizer, TaskSpec(), 1.0, n=64).exact == 1.0
