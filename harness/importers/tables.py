"""Tables in prose: Markdown (steps as rows or as columns, arms as rows), aligned columns, series with arrows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from harness.errors import UsageError
from harness.importers.base import Format, Notes, Record
from harness.importers.numbers import cell, number, whole
from harness.importers.scan import lines

RULE = re.compile(r"^\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$")
STEP_WORDS = {"step", "steps", "iteration", "iter", "train_step", "global_step", "it"}
RANGE = re.compile(r"^\**\s*\d+\s*[\u2013\u2014~-]\s*(?:\d+|end)\**$")
STEP_COLUMN = re.compile(r"^(?:step\s*)?(\d+)$", re.IGNORECASE)
ARROW = re.compile(r"^\s*[-*]?\s*([\w./ -]+?):\s*(\S+(?:\s*(?:->|→)\s*\S+)+)\s*$")

Rows = list[tuple[int, list[str]]]


def read(file: BinaryIO, notes: Notes, path: Path) -> Iterator[Record]:
    """Yield the numbers of every table of a file.

    Raises:
        UsageError: If a table gives ranges of steps or prose instead of numbers by step.
    """
    wide: dict[str, list[Record]] = {}
    for table in _blocks(file, notes):
        head, body = [h.strip().strip("*`") for h in table[0][1]], table[1:]
        if head[0].lower() in STEP_WORDS and all(STEP_COLUMN.match(h) for h in head[1:2]):
            for record in _wide(head, body, notes):
                wide.setdefault(record.run, []).append(record)
        elif head[0].lower() in STEP_WORDS:
            yield from _long(head, body, notes, path)
        elif any(STEP_COLUMN.match(h) for h in head[1:]):
            yield from _arms(head, body, notes)
        else:
            raise UsageError(
                f"{path}:{table[0][0]}: a table without steps (columns {', '.join(head)}): "
                "prose and summaries hold no trace"
            )
    for records in wide.values():
        yield from sorted(records, key=lambda r: r.step or 0)


def _blocks(file: BinaryIO, notes: Notes) -> Iterator[Rows]:
    """Yield tables: a row of names, then rows of cells with the numbers of their lines."""
    rows: Rows = []
    for at, raw in lines(file):
        text = raw.decode("utf-8", "replace").strip()
        cells = [c.strip() for c in text.strip("|").split("|")] if "|" in text else re.split(r"\s{2,}|\t", text)
        if text.startswith("#") or (text and "|" not in text and (len(cells) < 2 or RULE.match(text))):
            notes.skip("lines that are no table" if text.strip(".… ") else "elided rows")
        elif RULE.match(text) and text:
            continue
        elif not text:
            if len(rows) > 1:
                yield rows
            rows = []
        else:
            rows.append((at, cells))
    if len(rows) > 1:
        yield rows


def _long(head: Sequence[str], body: Rows, notes: Notes, path: Path) -> Iterator[Record]:
    for at, cells in body:
        place = cells[0].strip("*` ")
        if RANGE.match(place):
            raise UsageError(f"{path}:{at}: {place!r} is a range of steps: means over ranges are not a trace")
        step = whole(number(re.split(r"\s", place)[0])) if place else None
        if step is None:
            notes.skip("rows without a step")
            continue
        values = {}
        for name, text in zip(head[1:], cells[1:], strict=False):
            value = cell(text)
            if isinstance(value, float):
                values[name] = value
            else:
                notes.skip("empty cells" if value is None else "cells of text")
        if values:
            yield Record(at, values, step)


def _wide(head: Sequence[str], body: Rows, notes: Notes) -> Iterator[Record]:
    columns: dict[int, Record] = {}
    for at, cells in body:
        for name, text in zip(head[1:], cells[1:], strict=False):
            found = STEP_COLUMN.match(name)
            value = cell(text)
            if found is None:
                notes.skip("cells of a column that is no step")
            elif isinstance(value, float):
                columns.setdefault(int(found[1]), Record(at, {}, int(found[1]))).values[cells[0].strip("*` ")] = value
            else:
                notes.skip("empty cells" if value is None else "cells of text")
    yield from columns.values()


def _arms(head: Sequence[str], body: Rows, notes: Notes) -> Iterator[Record]:
    notes.warn("the table does not name its metric: it is called value; say which it is with --map")
    for at, cells in body:
        label = " ".join(c.strip("*` ") for h, c in zip(head, cells, strict=False) if not STEP_COLUMN.match(h))
        for name, text in zip(head, cells, strict=False):
            found, value = STEP_COLUMN.match(name), cell(text)
            if found and isinstance(value, float):
                yield Record(at, {"value": value}, int(found[1]), label)


def read_series(file: BinaryIO, notes: Notes, _path: Path) -> Iterator[Record]:
    """Yield ``label: 1.0 -> 2.0 -> nan`` as one run per line, steps counted from 1."""
    notes.warn("the series do not name their metric: it is called value; say which it is with --map")
    for at, raw in lines(file):
        match = ARROW.match(raw.decode("utf-8", "replace"))
        values = [number(v) for v in re.split(r"\s*(?:->|→)\s*", match[2])] if match else []
        if match is None or any(v is None for v in values):
            notes.skip("lines that are no series")
            continue
        for value in values:
            if value is not None:
                yield Record(at, {"value": value}, None, match[1].strip())


def _sniff_markdown(head: bytes, _path: Path) -> int:
    rows = [r for r in head.decode("utf-8", "replace").splitlines() if r.strip().startswith("|") and r.count("|") > 2]
    return len(rows) if any(RULE.match(r.strip()) for r in rows) else 0


def _sniff_aligned(head: bytes, _path: Path) -> int:
    rows = [re.split(r"\s{2,}|\t", r.strip()) for r in head.decode("utf-8", "replace").splitlines() if r.strip()]
    names = [r for r in rows if r[0].lower() in STEP_WORDS and len(r) > 1 and number(r[1]) is None]
    return sum(len(r) == len(names[0]) and number(r[0]) is not None for r in rows) if names else 0


def _sniff_series(head: bytes, _path: Path) -> int:
    found = [ARROW.match(r) for r in head.decode("utf-8", "replace").splitlines()]
    return sum(bool(m and all(number(v) is not None for v in re.split(r"\s*(?:->|→)\s*", m[2]))) for m in found)


FORMATS = (
    Format(
        "markdown-table",
        "Markdown tables, or columns aligned by spaces, with steps",
        "any",
        lambda head, path: _sniff_markdown(head, path) or _sniff_aligned(head, path),
        read,
        prose=True,
        anywhere=False,
    ),
    Format("series", "label: 1.0 -> 2.0 -> nan", "any", _sniff_series, read_series, prose=True, anywhere=False),
)
