"""Tables exported as CSV or TSV: any with a step column, W&B's and SwanLab's with a column per run and metric."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from harness.errors import UsageError
from harness.importers.base import Format, Notes, Record
from harness.importers.numbers import cell, number, whole
from harness.importers.scan import lines

STEPS = ("step", "_step", "global_step", "train/global_step", "train/step", "trainer/global_step", "iteration", "iter")
WANDB = re.compile(r"^(?P<run>.+?) - (?P<metric>[^ ].*?)(?P<bound>__MIN|__MAX)?$")
SWANLAB = re.compile(
    r"^(?P<run>.+?)-(?P<metric>(?:train|actor|critic|rollout|loss|reward|kl|grad)[^-]*?)(?P<time>_timestamp)?$"
)

ONE_LINE = str.maketrans({"\0": None, "\r": None})


def _dialect(head: str) -> str:
    first = head.split("\n", 1)[0]
    return max(",\t;", key=first.count)


def _step_column(names: Sequence[str]) -> int | None:
    lower = [n.strip().strip('"').lower() for n in names]
    return next((lower.index(s) for s in STEPS if s in lower), None)


def _table(file: BinaryIO) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Return the names and the rows with their line numbers; lines that begin with # stand above the names."""
    texts = ((at, raw.decode("utf-8-sig", "replace").translate(ONE_LINE)) for at, raw in lines(file))
    at, first = next(((at, text) for at, text in texts if not text.startswith("#")), (0, ""))
    delimiter = _dialect(first)
    names = next(csv.reader([first], delimiter=delimiter), [])
    rows = csv.reader((text for _, text in texts), delimiter=delimiter)
    return [n.strip() for n in names], ((at + rows.line_num, row) for row in rows)


def read(file: BinaryIO, notes: Notes, path: Path) -> Iterator[Record]:
    """Yield the rows of a table with a step column, or without one, counted.

    Raises:
        UsageError: If a row cannot be read as CSV, or a name stands over two columns.
    """
    names, rows = _table(file)
    at = _step_column(names)
    twice = {n for n in names if n and names.count(n) > 1}
    if twice:
        raise UsageError(f"{path}: the column {min(twice)} is there twice")
    try:
        for line, row in rows:
            values = {}
            for i, (name, text) in enumerate(zip(names, row, strict=False)):
                value = cell(text)
                if i == at or not name:
                    continue
                if isinstance(value, float):
                    values[name] = value
                else:
                    notes.skip("empty cells" if value is None else "cells of text")
            step = None if at is None or at >= len(row) else whole(number(row[at]))
            if at is not None and step is None:
                notes.skip("rows without a step")
            elif values:
                yield Record(line, values, step)
    except csv.Error as e:
        raise UsageError(f"{path}: not a table: {e}") from e


def _exported(pattern: re.Pattern[str], extra: str) -> Callable[[BinaryIO, Notes, Path], Iterator[Record]]:
    def read_exported(file: BinaryIO, notes: Notes, path: Path) -> Iterator[Record]:
        names, rows = _table(file)
        at = _step_column(names)
        if at is None:
            raise UsageError(f"{path}: no step column among {', '.join(names)}")
        places = [pattern.match(n) for n in names]
        found: dict[str, list[Record]] = {}
        for line, row in rows:
            step = whole(number(row[at])) if at < len(row) else None
            if step is None:
                notes.skip("rows without a step")
                continue
            by_run: dict[str, dict[str, float]] = {}
            for i, (place, text) in enumerate(zip(places, row, strict=False)):
                value = cell(text)
                if i == at or place is None or place[extra]:
                    continue
                if isinstance(value, float):
                    by_run.setdefault(place["run"], {})[place["metric"]] = value
                elif value is None:
                    notes.skip("empty cells")
            for run, values in by_run.items():
                found.setdefault(run, []).append(Record(line, values, step, run))
        for records in found.values():
            yield from records

    return read_exported


def _names(head: bytes) -> list[str]:
    text = "\n".join(r for r in head.decode("utf-8-sig", "replace").splitlines()[:50] if not r.startswith("#"))
    return [n.strip() for n in next(csv.reader([text.split("\n", 1)[0]], delimiter=_dialect(text)), [])] if text else []


def _sniff(kind: str) -> Callable[[bytes, Path], int]:
    def sniff(head: bytes, path: Path) -> int:
        if b"\0" in head[:4096]:
            return 0
        names = _names(head)
        at = _step_column(names)
        if at is None or len(names) < 2:
            return 0
        others = [n for i, n in enumerate(names) if i != at]
        wandb = any(WANDB.match(n) for n in others)
        swan = not wandb and any((m := SWANLAB.match(n)) and m["time"] for n in others)
        mine = "wandb-csv" if wandb else "swanlab-csv" if swan else "csv"
        return max(1, head.count(b"\n")) if mine == kind else 0

    return sniff


FORMATS = (
    Format("csv", "CSV or TSV with a step column", "any", _sniff("csv"), read, anywhere=False),
    Format(
        "wandb-csv", "W&B's export: run - metric", "any", _sniff("wandb-csv"), _exported(WANDB, "bound"), anywhere=False
    ),
    Format(
        "swanlab-csv",
        "SwanLab's export: run-metric",
        "any",
        _sniff("swanlab-csv"),
        _exported(SWANLAB, "time"),
        anywhere=False,
    ),
)
