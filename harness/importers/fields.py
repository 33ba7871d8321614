"""Console lines of named fields: Megatron, MindSpeed-RL, torchtitan, prime-rl, and losses compared line by line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from harness.importers.base import Format, Notes, Record, matches
from harness.importers.numbers import NUMBER, clean, number, whole
from harness.importers.scan import scan

MEGATRON = re.compile(rb"(?m)\biteration\s+\d+\s*/\s*\d+ \|[^\n]*")
MINDSPEED = re.compile(rb"\biteration: \d+ / \d+ \|[^\n]*")
TORCHTITAN = re.compile(rb"\bstep:\s+\d+\s+loss:[^\n]*")
PRIME = re.compile(rb"\bStep \d+ \| [^\n]*")
DEEPSPEED = re.compile(rb"(?:(?P<run>\w+ ?\d+): )?step ?(?P<step>\d+)(?:\.0)?, loss (?P<loss>[-+.\dea-z]+)")

BAR_FIELD = re.compile(rf"\s*([^|:]+?)\s*:\s*({NUMBER})(?:\s*%)?[^|]*")
SPACED_FIELD = re.compile(rf"([A-Za-z_][\w/.]*):\s+({NUMBER})")
MEGATRON_STEP = re.compile(r"iteration\s+(\d+)\s*/")
MINDSPEED_STEP = re.compile(r"iteration: (\d+) /")
PRIME_STEP = re.compile(r"Step (\d+) ")


def _barred(step: re.Pattern[str]) -> Callable[[str], tuple[int | None, dict[str, float]]]:
    """Return a parser of ``name: value | name: value``; units behind a value are left out."""

    def parse(text: str) -> tuple[int | None, dict[str, float]]:
        head, _, rest = text.partition("|")
        found = step.search(head)
        values: dict[str, float] = {}
        for piece in rest.split("|"):
            field = BAR_FIELD.fullmatch(piece)
            value = number(field[2]) if field else None
            if field and value is not None:
                values[field[1]] = value
        return (int(found[1]) if found else None), values

    return parse


def _spaced(text: str) -> tuple[int | None, dict[str, float]]:
    values = {name: v for name, digits in SPACED_FIELD.findall(text) if (v := number(digits)) is not None}
    return whole(values.pop("step", None)), values


def _reader(
    pattern: re.Pattern[bytes], parse: Callable[[str], tuple[int | None, dict[str, float]]]
) -> Callable[[BinaryIO, Notes, Path], Iterator[Record]]:
    def read(file: BinaryIO, notes: Notes, _path: Path) -> Iterator[Record]:
        for line, match in scan(file, pattern, notes):
            step, values = parse(clean(match.group()))
            if values:
                yield Record(line, values, step)
            else:
                notes.skip("records without a number")

    return read


def _compared(file: BinaryIO, notes: Notes, _path: Path) -> Iterator[Record]:
    for line, match in scan(file, DEEPSPEED, notes):
        value = number(match["loss"].decode("ascii", "replace"))
        if value is not None:
            yield Record(line, {"loss": value}, int(match["step"]), (match["run"] or b"").decode())


FORMATS = (
    Format(
        "megatron",
        "Megatron-LM's training log",
        "megatron",
        matches(MEGATRON),
        _reader(MEGATRON, _barred(MEGATRON_STEP)),
    ),
    Format(
        "mindspeed-rl",
        "MindSpeed-RL's console",
        "mindspeed_rl",
        matches(MINDSPEED),
        _reader(MINDSPEED, _barred(MINDSPEED_STEP)),
        warnings=("MindSpeed-RL logs the absolute value of actor/pg_loss: its sign is not known",),
        places=4,
    ),
    Format(
        "torchtitan",
        "torchtitan's console",
        "torchtitan",
        matches(TORCHTITAN),
        _reader(TORCHTITAN, _spaced),
        repeats=True,
    ),
    Format("prime-rl", "prime-rl's console", "prime_rl", matches(PRIME), _reader(PRIME, _barred(PRIME_STEP))),
    Format("deepspeed", "step N, loss X, one or more runs to a line", "any", matches(DEEPSPEED), _compared),
)
