"""Metrics behind a tqdm bar: OpenRLHF (``act_loss=0.1``) and trainers that print ``loss: 0.1``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from harness.importers.base import Format, Notes, Record, matches
from harness.importers.numbers import NUMBER, clean, number
from harness.importers.scan import scan

BAR = rb"\|\s*(?P<at>\d+)/(?:\d+|\?) \[[^\]\n\r]*?"
COLON = re.compile(BAR + rb"(?P<rest>, [A-Za-z_][\w/]*: ?[-+.\dnN][^\]\n\r]*)\]")
EQUALS = re.compile(BAR + rb"(?P<rest>, [A-Za-z_][\w/]*=[-+.\dnN][^\]\n\r]*)\]")
PAIR = re.compile(rf", ([A-Za-z_][\w/]*)(?::\s?|=)({NUMBER})(?=,|$)")


def read(file: BinaryIO, notes: Notes, _path: Path, pattern: re.Pattern[bytes] = COLON) -> Iterator[Record]:
    """Yield one record per set of values: a bar is printed before and after it moves, with the same values.

    The step of a set of values is the largest number that the bar shows beside it; of a set that was printed once,
    before the bar moved, it is one more than what the bar shows.
    """
    held: Record | None = None
    shown = last = -1
    for line, match in scan(file, pattern, notes):
        at = int(match["at"])
        text = clean(match["rest"])
        values = {name: v for name, digits in PAIR.findall(text) if (v := number(digits)) is not None}
        if not values:
            notes.skip("bars without values")
            continue
        if held is not None and _same(held.values, values):
            notes.skip("repeated bars")
            shown = max(shown, at)
            continue
        if held is not None:
            last = _step(shown, last)
            yield Record(held.line, held.values, last)
        if at < last:
            last = -1  # another epoch, or another run: the bar begins anew
        held, shown = Record(line, values), at
    if held is not None:
        yield Record(held.line, held.values, _step(shown, last))


def _step(shown: int, last: int) -> int:
    return shown if shown > last and shown > 0 else shown + 1


def _same(a: dict[str, float], b: dict[str, float]) -> bool:
    return a.keys() == b.keys() and all(x == b[n] or (x != x and b[n] != b[n]) for n, x in a.items())


def _read_equals(file: BinaryIO, notes: Notes, path: Path) -> Iterator[Record]:
    return read(file, notes, path, EQUALS)


FORMATS = (
    Format("tqdm", "metrics behind a progress bar, name: value", "any", matches(COLON), read),
    Format(
        "openrlhf",
        "OpenRLHF's progress bars",
        "openrlhf",
        matches(EQUALS),
        _read_equals,
        warnings=("OpenRLHF logs the gradient norm and the learning rate of the last micro-batch only",),
    ),
)
