"""NeMo-RL's console: a headline ``Step 3/100``, then bullets ``• Loss: 0.1``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from harness.importers.base import Format, Notes, Record, matches
from harness.importers.numbers import NUMBER, clean, number
from harness.importers.scan import scan

PATTERN = re.compile(r"=+ Step (?P<step>\d+)/\d+ =+|• (?P<name>[A-Z][\w ]*?): (?P<value>[-+.\dnNi][^\s]*)".encode())
HEADLINE = re.compile(rb"=+ Step \d+/\d+ =+")
ONLY = re.compile(NUMBER)


def read(file: BinaryIO, notes: Notes, _path: Path) -> Iterator[Record]:
    """Yield a record per headline; bullets before the first one are skipped."""
    held: Record | None = None
    for line, match in scan(file, PATTERN, notes):
        if match["step"]:
            if held is not None and held.values:
                yield held
            held = Record(line, {}, int(match["step"]))
            continue
        value = number(clean(match["value"]).rstrip(",;"))
        if held is None or value is None:
            notes.skip("bullets outside a step" if held is None else "bullets without a number")
        else:
            held.values.setdefault(clean(match["name"]), value)
    if held is not None and held.values:
        yield held


FORMAT = Format(
    "nemo-rl",
    "NeMo-RL's console",
    "nemo_rl",
    matches(HEADLINE),
    read,
    warnings=("NeMo-RL writes an infinite probability ratio as -1",),
)
