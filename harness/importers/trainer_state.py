"""The HF Trainer's trainer_state.json: ``log_history``, a list of records with a step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from harness.errors import UsageError
from harness.importers.base import Format, Notes, Record
from harness.importers.json_lines import numbers
from harness.importers.numbers import whole

LARGEST = 1 << 30


def read(file: BinaryIO, notes: Notes, path: Path) -> Iterator[Record]:
    """Yield the training rows of ``log_history``; the line is the row's number.

    Raises:
        UsageError: If the file is not JSON, or holds no list of that name.
    """
    try:
        data = json.loads(file.read(LARGEST))
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{path} is not whole JSON: {e}") from e
    rows = data.get("log_history") if isinstance(data, dict) else None
    if not isinstance(rows, list):
        raise UsageError(f"{path} has no list log_history; it is not a trainer_state.json")
    for at, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            notes.skip("rows that are no objects")
            continue
        values = numbers(row)
        step = whole(values.pop("step", None))
        nulls = [name for name, value in row.items() if value is None]
        notes.skip("null values", len(nulls))
        if any(name.startswith("eval_") for name in values):
            notes.skip("validation rows")
        elif "train_runtime" in values:
            notes.skip("summary rows")
        elif values:
            yield Record(at, values, step)


def _sniff(head: bytes, path: Path) -> int:
    return 1_000_000 if path.name == "trainer_state.json" or b'"log_history"' in head else 0


FORMAT = Format(
    "hf-trainer-state", "trainer_state.json of the HF Trainer", "trl", _sniff, read, hides=True, anywhere=False
)
