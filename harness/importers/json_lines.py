"""JSON lines: verl's file logger, and any other with a number per key."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from harness.importers.base import Format, Notes, Record, matches
from harness.importers.numbers import number, whole
from harness.importers.scan import scan

VERL = re.compile(rb'\{"step":\s*\d+,\s*"data":\s*\{[^\n]*')
SWIFT = re.compile(rb'(?m)^\s*\{"[^\n]*"(?:global_step/max_steps|train_speed\(iter/s\)|memory\(GiB\))":')
ANY = re.compile(rb'(?m)^\s*\{"[^\n]*')
STEPS = ("step", "global_step", "_step", "train/step", "trainer/global_step", "rollout/step")


def objects(file: BinaryIO, notes: Notes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield every line that is a JSON object."""
    for line, match in scan(file, ANY, notes):
        text = match.group().decode("utf-8", "replace").strip()
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            notes.skip("records cut short or not JSON")
            continue
        if isinstance(data, dict):
            yield line, data


def numbers(data: Mapping[str, Any]) -> dict[str, float]:
    """Take the values that are numbers, or the strings "nan", "inf" and "-inf"; nested objects by joined names."""
    found: dict[str, float] = {}
    for name, value in data.items():
        if isinstance(value, Mapping):
            found.update({f"{name}/{inner}": v for inner, v in numbers(value).items()})
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                found[str(name)] = float(value)
            except OverflowError:
                continue
        elif isinstance(value, str) and (v := number(value)) is not None and not math.isfinite(v):
            found[str(name)] = v
    return {n: v for n, v in found.items() if n}


def read_verl(file: BinaryIO, notes: Notes, _path: Path) -> Iterator[Record]:
    """Yield verl's records: null in a metric that is a number elsewhere is a NaN or an infinity (orjson)."""
    for line, data in objects(file, notes):
        inner = data.get("data")
        if not isinstance(inner, dict):
            notes.skip("objects without data")
            continue
        values = numbers(inner)
        nulls = [str(n) for n, v in inner.items() if v is None and n]
        if nulls:
            notes.warn("null stands for NaN or an infinity here (orjson writes both so); it was taken for NaN")
            values |= dict.fromkeys(nulls, math.nan)
        kept = {n: v for n, v in values.items() if not n.startswith(("val-", "val/"))}
        notes.skip("validation values", len(values) - len(kept))
        if kept:
            yield Record(line, kept, whole(number(str(data.get("step")))))


def read_any(file: BinaryIO, notes: Notes, _path: Path) -> Iterator[Record]:
    """Yield records of JSON lines of any origin."""
    for line, data in objects(file, notes):
        step = next((data[s] for s in STEPS if s in data), None)
        values = {n: v for n, v in numbers(data).items() if n not in STEPS}
        notes.skip("null values", sum(v is None for v in data.values()))
        if any(n.startswith(("eval_", "eval/", "val/")) for n in values):
            kept = {n: v for n, v in values.items() if not n.startswith(("eval_", "eval/", "val/"))}
            notes.skip("validation values", len(values) - len(kept))
            values = kept
        if values:
            yield Record(line, values, whole(number(str(step))))


def _plain(head: bytes, path: Path) -> int:
    """Count the objects that are not one of the formats above, a little less than those, so that they win."""
    special = len(VERL.findall(head)) + len(SWIFT.findall(head))
    return (
        0 if special or path.name == "trainer_state.json" else len(re.findall(rb'(?m)^\s*\{"[^\n]*:[^\n]*\}\s*$', head))
    )


FORMATS = (
    Format("verl-jsonl", "verl's file logger", "verl", matches(VERL), read_verl),
    Format("jsonl", "JSON lines with a number per key", "any", _plain, read_any),
)
