"""Verifiable character tasks: prompts with one right answer, drawn by (seed, stream, step), and their reward."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.errors import UsageError, unknown

if TYPE_CHECKING:
    import torch

    from harness.spec import TaskSpec

SYMBOLS = "0123456789abcdefghij+-=<>#"
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"


@dataclass(frozen=True)
class Problem:
    """One prompt and its only right answer.

    Attributes:
        task: Name of the task it comes from.
        prompt: For example ``"17+25="``.
        answer: For example ``"42"``.
    """

    task: str
    prompt: str
    answer: str


def _add(rng: np.random.Generator) -> tuple[str, str]:
    a, b = (int(x) for x in rng.integers(0, 50, 2))
    return f"{a}+{b}=", str(a + b)


def _sub(rng: np.random.Generator) -> tuple[str, str]:
    a, b = (int(x) for x in rng.integers(0, 50, 2))
    return f"{a}-{b}=", str(a - b)


def _word(rng: np.random.Generator, symbols: str, low: int, high: int) -> str:
    return "".join(symbols[int(i)] for i in rng.integers(0, len(symbols), int(rng.integers(low, high + 1))))


def _reverse(rng: np.random.Generator) -> tuple[str, str]:
    word = _word(rng, "abcdefghij", 2, 6)
    return f"<{word}=", word[::-1]


def _sort(rng: np.random.Generator) -> tuple[str, str]:
    word = _word(rng, "0123456789", 2, 6)
    return f">{word}=", "".join(sorted(word))


def _digit_sum(rng: np.random.Generator) -> tuple[str, str]:
    word = _word(rng, "0123456789", 2, 5)
    return f"#{word}=", str(sum(map(int, word)))


TASKS: dict[str, Callable[[np.random.Generator], tuple[str, str]]] = {
    "add": _add,
    "sub": _sub,
    "reverse": _reverse,
    "sort": _sort,
    "digit_sum": _digit_sum,
}


def rng_of(seed: int, stream: str, step: int) -> np.random.Generator:
    """Return a generator that is a function of (seed, stream, step)."""
    key = hashlib.sha256(f"{seed}/{stream}/{step}".encode()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "big")))


def draw(task: TaskSpec, seed: int, stream: str, step: int, n: int) -> list[Problem]:
    """Draw ``n`` problems of a mixture; the first problems do not depend on ``n``.

    Streams are drawn independently. The tasks are small (addition has 2,500 prompts), so a problem may come up in more
    than one stream: an ability is that of doing the task, not of generalising to prompts never seen.

    Args:
        task: The mixture.
        seed: Seed.
        stream: Purpose: ``prompts``, ``training``, ``calibration`` or ``evaluation``; any name is a stream.
        step: Step of the purpose.
        n: Number of problems.

    Raises:
        UsageError: If the mixture names a task that does not exist, or has a weight that is not positive.
    """
    names = list(task.mixture)
    for name in names:
        if name not in TASKS:
            raise unknown("task", name, TASKS)
        if not 0 < task.mixture[name] < np.inf:
            raise UsageError(f"the weight of task {name} is {task.mixture[name]}; it must be positive and finite")
    if not names:
        raise UsageError("the task mixture is empty; name at least one task")
    edges = np.cumsum([task.mixture[name] for name in names])
    rng = rng_of(seed, stream, step)
    problems = []
    for _ in range(n):
        name = names[int(np.searchsorted(edges / edges[-1], rng.random(), side="right"))]
        problems.append(Problem(name, *TASKS[name](rng)))
    return problems


def prompt_batch(task: TaskSpec, seed: int, step: int, n: int) -> list[Problem]:
    """Draw the problems of one RL step."""
    return draw(task, seed, "prompts", step, n)


def reward_of(answer: str, completion: str) -> float:
    """Score a completion: 1 if right, else half the share of characters that stand in their place.

    The share is taken over the longer of both texts, so neither a short nor a long completion gains by its length.
    Spaces at both ends do not count.
    """
    completion = completion.strip()
    if completion == answer:
        return 1.0
    hits = sum(a == c for a, c in zip(answer, completion, strict=False))
    return 0.5 * hits / max(len(answer), len(completion))


def make_tokenizer() -> Any:
    """Return the character tokenizer: one token per symbol, left padding, no token added by itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: i for i, symbol in enumerate([PAD, BOS, EOS, *SYMBOLS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, padding_side="left"
    )


def encode(problems: list[Problem], tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode problems with their answers, for teacher forcing.

    Returns:
        ``tokens [B, T]`` int64 (right-padded), ``attention_mask [B, T]`` int64, ``answer_mask [B, T]`` float32: 1 on
        the tokens of the answer and its end token.
    """
    import torch

    rows, answers = [], []
    for p in problems:
        prompt = tokenizer(p.prompt, add_special_tokens=False)["input_ids"]
        answer = [*tokenizer(p.answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        rows.append(prompt + answer)
        answers.append(len(answer))
    length = max(map(len, rows))
    tokens = torch.full((len(rows), length), tokenizer.pad_token_id)
    attention, mask = torch.zeros(len(rows), length, dtype=torch.int64), torch.zeros(len(rows), length)
    for i, (row, size) in enumerate(zip(rows, answers, strict=True)):
        tokens[i, : len(row)] = torch.tensor(row)
        attention[i, : len(row)] = 1
        mask[i, len(row) - size : len(row)] = 1
    return tokens, attention, mask


def calibration_batches(
    task: TaskSpec, tokenizer: Any, sequences: int, *, seed: int, batch_size: int = 64
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return task text for the proxy builder: ``(tokens [B, T], attention_mask [B, T])`` per batch."""
    problems = draw(task, seed, "calibration", 0, sequences)
    batches = []
    for start in range(0, sequences, batch_size):
        tokens, attention, _ = encode(problems[start : start + batch_size], tokenizer)
        batches.append((tokens, attention))
    return batches
