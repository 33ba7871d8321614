"""verl's console: ``step:12 - actor/pg_loss:0.01 - ...`` on one line, perhaps behind a Ray prefix and colours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from harness.importers.base import Format, Notes, Record, matches
from harness.importers.numbers import NUMBER, clean, number, whole
from harness.importers.scan import scan

PATTERN = re.compile(
    rb"step:\d+(?:\.0*)? - [^\n]*"
    rb"(?P<more>(?:\r?\n(?!\s*(?:\(|step:|#))[^\n]{0,80}? - [A-Za-z][^\s:]*:[^\n]*)*)"  # lines that go on with it
    rb"(?:\n|\Z)"
)
PAIR = re.compile(rf"(?:^| - )(\S+?):({NUMBER})(?=\s|$)")


def read(file: BinaryIO, notes: Notes, _path: Path) -> Iterator[Record]:
    """Yield one record per line; a name without a value at the end of a line is what a break left."""
    for line, match in scan(file, PATTERN, notes):
        text = clean(match.group()).replace("\r", "").replace("\n", "").rstrip().rstrip("'\"")
        values = {name: v for name, text_ in PAIR.findall(text) if (v := number(text_)) is not None}
        step = whole(values.pop("step", None))
        broken = len(text.split(" - ")) - 1 - len(values)
        if broken > 0:
            notes.skip("pieces of a record without a number", broken)
            notes.warn(f"the record at line {line} is broken or cut short: what can be read of it was kept")
        if match["more"]:
            notes.warn(f"the record at line {line} is broken over several lines: they were joined, numbers included")
        kept = {n: v for n, v in values.items() if not n.startswith(("val-", "val/"))}
        notes.skip("validation values", len(values) - len(kept))
        if kept:
            yield Record(line, kept, step)


FORMAT = Format("verl-console", "verl's console lines", "verl", matches(PATTERN), read)
