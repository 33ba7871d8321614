"""Calibration text for the proxy builder: tasks, a file of texts, or random tokens, as batches of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError, unknown
from harness.rl.tasks import TASKS, draw, encode

if TYPE_CHECKING:
    import torch

    from harness.spec import TaskSpec

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")
LENGTH = 512  # tokens of a text at most
ROWS = 8  # texts of a batch


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a checkpoint folder.

    Raises:
        UsageError: If the folder has none that can be loaded.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZER):  # transformers would make up an empty one
        raise UsageError(f"{folder} has no tokenizer (none of {', '.join(TOKENIZER)}); save it with the checkpoint")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as e:
        raise UsageError(f"{folder} has a tokenizer that cannot be loaded: {e}") from e


def calibration(folder: Path, source: str, tokens: int, seed: int = 0) -> list[tuple[torch.Tensor, Any]] | None:
    """Return calibration text in the tokens of a checkpoint.

    Args:
        folder: Checkpoint folder, with its tokenizer unless ``source`` is ``random`` or ``none``.
        source: ``task`` (all tasks), ``task:NAME``, ``random`` (uniform tokens), ``none``, or a file of JSON lines.
        tokens: How many tokens, about: texts are not cut for it.
        seed: Of tasks and random tokens.

    Returns:
        Batches ``(tokens [B, T] int64, attention_mask [B, T] int64)``; None for ``none``.

    Raises:
        UsageError: If there is no such task or file, or the file holds no usable text.
    """
    if source == "none":
        return None
    if source == "random":
        return _random(folder, tokens, seed)
    if source == "task" or source.startswith("task:"):
        return _tasks(load_tokenizer(folder), source.partition(":")[2], tokens, seed)
    if not Path(source).is_file():
        raise UsageError(f"calibration {source!r} is not a file; others: task, task:NAME, random, none")
    return _file(Path(source), load_tokenizer(folder), tokens)


def _random(folder: Path, tokens: int, seed: int) -> list[tuple[torch.Tensor, Any]]:
    import torch

    from harness.rl.context import keyed_seed
    from proxies.checkpoint import CheckpointError, read_json

    try:
        vocabulary = read_json(folder / "config.json").get("vocab_size")
    except CheckpointError as e:
        raise UsageError(str(e)) from e
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise UsageError(f"{folder / 'config.json'}: vocab_size = {vocabulary!r} where a positive integer is needed")
    length = 128
    count = -(-tokens // (ROWS * length))
    generator = torch.Generator().manual_seed(keyed_seed(seed, "calibration", 0))
    drawn = torch.randint(0, vocabulary, (count, ROWS, length), generator=generator)
    return [(batch, torch.ones_like(batch)) for batch in drawn]


def _tasks(tokenizer: Any, name: str, tokens: int, seed: int) -> list[tuple[torch.Tensor, Any]]:
    from harness.spec import TaskSpec

    if name and name not in TASKS:
        raise unknown("task", name, TASKS)
    task: TaskSpec = TaskSpec(mixture={name: 1.0}) if name else TaskSpec()
    batches: list[tuple[torch.Tensor, Any]] = []
    count = 0
    while count < tokens:
        batch, mask, _ = encode(draw(task, seed, "calibration", len(batches), 64), tokenizer)
        batches.append((batch, mask))
        count += int(mask.sum())
    return batches


def _file(path: Path, tokenizer: Any, tokens: int) -> list[tuple[torch.Tensor, Any]]:
    import torch

    rows: list[list[int]] = []
    count = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip() and count < tokens:
                rows.append(tokenizer(_text(path, number, line, tokenizer))["input_ids"][:LENGTH])
                count += len(rows[-1])
    if not count:
        raise UsageError(f"{path} holds no usable text; each line is a JSON object with text, or prompt and answer")
    batches = []
    for start in range(0, len(rows), ROWS):
        part = [row for row in rows[start : start + ROWS] if row]
        width = max((len(row) for row in part), default=0)
        if width:
            ids = torch.tensor([[0] * (width - len(row)) + row for row in part])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in part])
            batches.append((ids, mask))
    return batches


def _text(path: Path, number: int, line: str, tokenizer: Any) -> str:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as e:
        raise UsageError(f"{path}, line {number}: not valid JSON ({e.msg}, column {e.colno})") from None
    if isinstance(data, dict):
        if isinstance(data.get("text"), str):
            return str(data["text"])
        if isinstance(data.get("prompt"), str):
            answer = next((data[k] for k in ("answer", "response", "completion") if isinstance(data.get(k), str)), "")
            return f"{data['prompt']}{answer}"
        if isinstance(data.get("messages"), list):
            return str(tokenizer.apply_chat_template(data["messages"], tokenize=False))
    raise UsageError(
        f"{path}, line {number}: no text; a JSON object with text, prompt and answer, or messages is needed"
    )
