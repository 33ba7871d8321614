"""How well a checkpoint does a task, and the gate that a proxy must pass before it stands in for an original."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.rl import tasks

if TYPE_CHECKING:
    import torch

    from harness.rl.policy import Policy
    from harness.spec import TaskSpec

PROBLEMS = 512
LONGEST = 8  # tokens of a response; the longest answer has 6 characters and an end token
SIGMAS = 5.0
GREEDY = 1e-6  # temperature that stands for 0: a gap of 1e-4 between two logits is certain


@dataclass(frozen=True)
class AbilityScore:
    """Result of answering problems.

    Attributes:
        exact: Share of problems answered exactly.
        error: Binomial standard error of that share.
        reward: Mean reward.
        per_task: Share answered exactly, per task.
        problems: Number of problems.
    """

    exact: float
    error: float
    reward: float
    per_task: Mapping[str, float]
    problems: int


def score(
    policy: Policy, tokenizer: Any, task: TaskSpec, temperature: float, *, n: int = PROBLEMS, seed: int = 0
) -> AbilityScore:
    """Let a policy answer problems of the evaluation stream, with random numbers that ``seed`` decides.

    Args:
        policy: Who answers.
        tokenizer: Its tokenizer.
        task: Which problems.
        temperature: Of the sampling; 0 takes the likeliest token.
        n: Number of problems.
        seed: Seed of problems and sampling.
    """
    import torch

    from harness.rl import grpo
    from harness.rl.context import keyed_seed
    from harness.rl.rollout import sample
    from harness.rl.stages import Batch
    from harness.spec import RLSpec

    problems = tasks.draw(task, seed, "evaluation", 0, n)
    encoded = tokenizer([p.prompt for p in problems], return_tensors="pt", padding=True, padding_side="left")
    batch = Batch(encoded["input_ids"], encoded["attention_mask"], torch.zeros(n, 0), tuple(p.answer for p in problems))
    uniforms = torch.rand(n, LONGEST, generator=torch.Generator().manual_seed(keyed_seed(seed, "evaluation", 0)))
    drawn, mask, _ = sample(policy, batch, uniforms, temperature or GREEDY, grpo.clean_ops(RLSpec()), tokenizer)
    texts = tokenizer.batch_decode([t[m.bool()] for t, m in zip(drawn, mask, strict=True)], skip_special_tokens=True)
    rewards = [tasks.reward_of(p.answer, text) for p, text in zip(problems, texts, strict=True)]
    return summarise([p.task for p in problems], rewards)


def summarise(names: list[str], rewards: list[float]) -> AbilityScore:
    """Turn rewards into a score; a reward of 1 is an exact answer."""
    exact = [r == 1.0 for r in rewards]
    rate = sum(exact) / len(exact)
    per_task = {
        name: sum(e for e, n in zip(exact, names, strict=True) if n == name) / names.count(name)
        for name in sorted(set(names))
    }
    error = math.sqrt(rate * (1 - rate) / len(exact))
    return AbilityScore(rate, error, sum(rewards) / len(rewards), per_task, len(exact))


def expert_shares(policy: Policy, tokenizer: Any, task: TaskSpec, *, n: int = PROBLEMS) -> torch.Tensor:
    """Return how often each expert is chosen on solved problems of the evaluation stream.

    Returns:
        ``[L, E]`` float64, in units of an even share: 1 everywhere if all experts are used alike.
    """
    import torch

    tokens, attention, _ = tasks.encode(tasks.draw(task, 0, "evaluation", 0, n), tokenizer)
    real = attention.reshape(-1).bool()
    choices: dict[str, torch.Tensor] = {}
    handles = [
        module.register_forward_pre_hook(lambda _m, args, name=name: choices.update({name: args[1][real]}))
        for name, module in policy.modules("experts")
    ]
    try:
        with torch.no_grad():
            policy.model(input_ids=tokens, attention_mask=attention, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    layers = []
    for (_, router), chosen in zip(policy.modules("router"), choices.values(), strict=True):
        experts = router.get_parameter("weight").shape[0]
        counts = torch.bincount(chosen.reshape(-1), minlength=experts).double()
        layers.append(counts * experts / chosen.numel())
    return torch.stack(layers)


def rates(folders: Mapping[str, Path], task: TaskSpec, temperature: float, *, n: int = PROBLEMS) -> dict[str, float]:
    """Return the exact-match rate of each checkpoint, and of ``chance``: the first one's architecture, untrained."""
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from harness.rl.policy import Policy
    from harness.spec import SideSpec

    transformers.utils.logging.disable_progress_bar()
    first = next(iter(folders.values()))
    found = {}
    for name, folder in folders.items():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        found[name] = score(Policy.load(folder, SideSpec()), tokenizer, task, temperature, n=n).exact
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        untrained = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(first, local_files_only=True))
    tokenizer = AutoTokenizer.from_pretrained(first, local_files_only=True, trust_remote_code=False)
    found["chance"] = score(Policy(untrained.eval()), tokenizer, task, temperature, n=n).exact
    return found


def refusal(rates: Mapping[str, float], *, floor: float, n: int = PROBLEMS) -> str | None:
    """Return why a proxy does not pass, or None if it does.

    It passes with at least ``floor`` of the original's exact-match rate, and at least five standard errors above
    chance; the error is that of a rate of at least one in ``n``, so that a chance of 0 is not taken for certain.

    Args:
        rates: Exact-match rates of ``original``, ``proxy`` and ``chance``.
        floor: Least share of the original's rate.
        n: Problems behind each rate.
    """
    original, proxy, chance = rates["original"], rates["proxy"], rates["chance"]
    if not proxy >= floor * original:  # so that a missing rate does not pass
        return f"it answers {proxy:.1%} exactly, less than {floor:.0%} of the original's {original:.1%}"
    spread = max(chance, 1 / n)
    bar = chance + SIGMAS * math.sqrt(spread * (1 - spread) / n)
    if not proxy >= bar:
        return f"it answers {proxy:.1%} exactly, not clearly above chance ({chance:.1%}; bar {bar:.1%})"
    return None
