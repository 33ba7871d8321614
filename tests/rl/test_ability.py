from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from harness.rl import ability, tasks
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


def test_a_missing_rate_does_not_pass() -> None:
    for name in ("original", "proxy", "chance"):
        rates = {"original": 0.7, "proxy": 0.6, "chance": 0.0, name: math.nan}
        assert ability.refusal(rates, floor=0.3) is not None, name


def test_gate_refuses_random_weights(checkpoint: Path) -> None:
    found = ability.rates({"original": checkpoint, "proxy": checkpoint}, TaskSpec(), 1.0, n=128)
    assert set(found) == {"original", "proxy", "chance"}
    assert found["original"] == found["proxy"]
    assert "not clearly above chance" in str(ability.refusal(found, floor=0.3, n=128))
    assert "less than 30%" in str(ability.refusal({**found, "original": 0.7}, floor=0.3, n=128))


def test_temperature_zero_is_greedy(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    policy = Policy.load(checkpoint, SideSpec())
    task = TaskSpec(mixture={"reverse": 1.0})
    texts: list[str] = []

    def keep(_answer: str, text: str) -> float:
        texts.append(text)
        return 0.0

    monkeypatch.setattr(tasks, "reward_of", keep)
    ability.score(policy, tokenizer, task, 0.0, n=8)
    ability.score(policy, tokenizer, task, 1.0, n=8)
    for problem, text in zip(draw(task, 0, "evaluation", 0, 8), texts[:8], strict=True):
        tokens = tokenizer(problem.prompt, return_tensors="pt")["input_ids"]
        out = policy.model.generate(tokens, do_sample=False, max_new_tokens=ability.LONGEST)
        assert tokenizer.decode(out[0, tokens.shape[1] :], skip_special_tokens=True) == text
    assert texts[8:] != texts[:8]


def test_expert_shares_count_choices_at_tokens_only(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    policy = Policy.load(checkpoint, SideSpec())
    shares = ability.expert_shares(policy, tokenizer, TaskSpec(), n=16)
    chosen = torch.zeros_like(shares)
    tokens = 0
    for p in draw(TaskSpec(), 0, "evaluation", 0, 16):  # one at a time: no padding
        ids = tokenizer(p.prompt + p.answer, return_tensors="pt")["input_ids"]
        ids = torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], 1)
        tokens += ids.shape[1]
        for layer, logits in enumerate(policy.model(ids, output_router_logits=True).router_logits):
            for expert in logits.topk(2, -1).indices.flatten().tolist():
                chosen[layer, expert] += 1
    assert torch.equal(shares, chosen * 8 / (2 * tokens))
    assert shares.mean(1).tolist() == pytest.approx([1.0, 1.0])


def test_a_perfect_policy_scores_one_and_a_random_one_near_zero(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    policy = Policy.load(checkpoint, SideSpec())
    random = ability.score(policy, tokenizer, TaskSpec(), 1.0, n=64)
    assert random.exact < 0.1
    assert set(random.per_task) <= set(TASKS)
    assert random == ability.score(policy, tokenizer, TaskSpec(), 1.0, n=64)

    answers = iter(draw(TaskSpec(), 0, "evaluation", 0, 64))
    monkeypatch.setattr(tasks, "reward_of", lambda answer, _text: float(next(answers).answer == answer))
    assert ability.score(policy, tokenizer, TaskSpec(), 1.0, n=64).exact == 1.0
