"""msProbe (Ascend): CSVs of its monitor and of its gradient probe, and reports of its overflow check.

Layouts as msProbe's own tests and documents show them; no file of a real run was at hand, so that what a run writes is
unverified. A folder is read as one run: the files of its steps in order.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from harness.errors import UsageError
from harness.importers.base import Format, Notes, Record
from harness.importers.numbers import number, whole
from harness.importers.scan import lines
from harness.importers.separated import ONE_LINE

MONITOR = b"vpp_stage,name,step"
PROBE = b"param_name,"
OPS = ("norm", "max", "min", "mean", "nans", "zeros")
SUMMARY = re.compile(r"grad_summary_(\d+)\.csv$")
RANGE = re.compile(r"grad_reduced_(\d+)-(\d+)\.csv$")
STEP_FOLDER = re.compile(r"step(\d+)$")
GROUPS = (
    ("experts", re.compile(r"experts")),
    ("router", re.compile(r"router|mlp\.gate\.|\.gate\.(?:weight|wg)|block_sparse_moe\.gate")),
    ("embedding", re.compile(r"embed|lm_head|output_layer")),
    ("norms", re.compile(r"norm|layernorm|\bln")),
    ("attention", re.compile(r"attn|attention")),
)
"""Which group of the harness a parameter belongs to, by its name; the first that matches."""


def read_monitor(file: BinaryIO, notes: Notes, path: Path) -> Iterator[Record]:
    """Yield a record per step of a monitor's CSV: ``name/op`` for every row, of several micro-steps the last.

    Raises:
        UsageError: If the file has no column of a statistic.
    """
    names, rows = _rows(file, path)
    at = {n: i for i, n in enumerate(names)}
    held: Record | None = None
    gradients = "grad" in path.name and "actv" not in path.name
    for line, row in rows:
        step = whole(number(row[at["step"]])) if len(row) == len(names) else None
        if step is None:
            notes.skip("rows without a step, or cut short")
            continue
        if held is not None and held.step != step:
            yield _grouped(held, notes) if gradients else held
            held = None
        if held is None:
            held = Record(line, {}, step)
        stage = row[at["vpp_stage"]]
        name = row[at["name"]] if stage in ("", "0") else f"vp{stage}:{row[at['name']]}"
        if any(f"{name}/{op}" in held.values for op in OPS):
            notes.skip("earlier micro-steps of a step")
        _take(held, name, {op: row[at[op]] for op in OPS if op in at}, notes)
    if held is not None:
        yield _grouped(held, notes) if gradients else held


def read_probe(file: BinaryIO, notes: Notes, path: Path) -> Iterator[Record]:
    """Yield the one record of a gradient probe's ``grad_summary_STEP.csv``.

    Raises:
        UsageError: If the file's name does not say the step, or it has no column of a statistic.
    """
    found = SUMMARY.search(path.name)
    if found is None:
        raise UsageError(
            f"{path}: the step of a gradient summary stands in its name, grad_summary_STEP.csv; it does not"
        )
    names, rows = _rows(file, path)
    at = {n: i for i, n in enumerate(names)}
    record = Record(1, {}, int(found[1]))
    for _, row in rows:
        if len(row) != len(names):
            notes.skip("rows that are cut short")
            continue
        _take(record, row[at["param_name"]], {op: row[at[op]] for op in OPS if op in at}, notes)
    if record.values:
        yield _grouped(record, notes)


def read_overflow(file: BinaryIO, notes: Notes, path: Path) -> Iterator[Record]:
    """Yield how many operators overflowed in the step and rank that the folders of a ``dump.json`` name.

    Raises:
        UsageError: If it is not a whole report, or its folder does not name the step.
    """
    try:
        data = json.loads(file.read(1 << 30))
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{path} is not whole JSON: {e}") from e
    step = next((m for p in path.absolute().parents if (m := STEP_FOLDER.search(p.name))), None)
    if step is None:
        raise UsageError(f"{path}: an overflow report lies in stepN/rankR, which say its step; this one does not")
    calls = data.get("data") if isinstance(data, dict) else None
    if not isinstance(calls, Mapping):
        raise UsageError(f"{path} has no object data; it is not a report of msProbe")
    if calls:
        notes.warn(f"step {step[1]}: first to overflow: {next(iter(calls))}")
    values = {
        "overflow/operators": float(len(calls)),
        "overflow/nonfinite": float(sum(map(_nonfinite, calls.values()))),
    }
    rank = path.absolute().parent.name
    yield Record(1, values, int(step[1]), rank if rank.startswith("rank") else "")


def members(folder: Path) -> tuple[str, list[Path]] | None:
    """Return the format and the files, in order of steps, of a folder that msProbe wrote; None if it did not."""
    probe = sorted((int(m[1]), p) for p in folder.iterdir() if (m := SUMMARY.search(p.name)))
    monitor = sorted((int(m[1]), p) for p in folder.iterdir() if (m := RANGE.search(p.name)))
    overflow = sorted(
        (p.parent.name, int(m[1]), p)
        for p in folder.glob("step*/rank*/dump.json")
        if (m := STEP_FOLDER.search(p.parts[-3]))
    )
    if probe:
        return "msprobe-grad", [p for _, p in probe]
    if monitor:
        return "msprobe-monitor", [p for _, p in monitor]
    return ("msprobe-overflow", [p for *_, p in overflow]) if overflow else None


def _rows(file: BinaryIO, path: Path) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    texts = lines(file)
    names = [n.strip() for n in _cells(next(texts, (1, b"")), path)]
    needed = {"vpp_stage", "name", "step"} if "vpp_stage" in names else {"param_name"}
    if not needed <= set(names) or not set(OPS) & set(names):
        raise UsageError(f"{path}:1: not a table of msProbe's statistics (columns {', '.join(names) or 'none'})")
    return names, ((text[0], row) for text in texts if (row := _cells(text, path)))


def _cells(line: tuple[int, bytes], path: Path) -> list[str]:
    text = line[1].decode("utf-8-sig", "replace").translate(ONE_LINE).rstrip("\n")
    try:
        return next(csv.reader([text]), [])
    except csv.Error as e:
        raise UsageError(f"{path}:{line[0]}: not a row of a table: {e}") from e


def _take(record: Record, name: str, cells: Mapping[str, str], notes: Notes) -> None:
    for op, text in cells.items():
        value = number(text)
        if value is None:
            notes.skip("empty cells" if not text.strip() else "cells of text")
        elif name:
            record.values[f"{name}/{op}"] = value


def _grouped(record: Record, notes: Notes) -> Record:
    """Add the norm over all parameters, and over the groups that the harness records, as the root of summed squares."""
    squares: dict[str, float] = {}
    norms = {n.removesuffix("/norm"): v for n, v in record.values.items() if n.endswith("/norm")}
    for name, norm in norms.items():
        group = next((g for g, pattern in GROUPS if pattern.search(name)), None)
        for key in ("grad_norm", *([f"grad_norm/{group}"] if group else [])):
            squares[key] = squares.get(key, 0.0) + norm * norm
    if squares:
        notes.warn(
            "grad_norm and its groups were computed from the norms of the parameters in the file: "
            "of a sharded run, or a chosen list of parameters, that is a part"
        )
    return Record(
        record.line, {**record.values, **{k: math.sqrt(v) if v >= 0 else v for k, v in squares.items()}}, record.step
    )


def _nonfinite(call: Any) -> bool:
    """Whether any statistic of a call is NaN or infinite; JSON's NaN and strings both count."""
    if isinstance(call, Mapping):
        return any(_nonfinite(v) for v in call.values())
    if isinstance(call, list):
        return any(_nonfinite(v) for v in call)
    value = number(call) if isinstance(call, str) else call
    return isinstance(value, float) and not math.isfinite(value)


def _starts(head: bytes, path: Path, begin: bytes) -> int:
    return 1_000_000 if head.removeprefix(b"\xef\xbb\xbf").startswith(begin) else 0


FORMATS = (
    Format(
        "msprobe-monitor",
        "msProbe's monitor: a row per parameter and step",
        "any",
        lambda head, path: _starts(head, path, MONITOR),
        read_monitor,
        anywhere=False,
    ),
    Format(
        "msprobe-grad",
        "msProbe's gradient probe: grad_summary_STEP.csv, or a folder of them",
        "any",
        lambda head, path: _starts(head, path, PROBE),
        read_probe,
        anywhere=False,
    ),
    Format(
        "msprobe-overflow",
        "msProbe's overflow check: stepN/rankR/dump.json, or their folder",
        "any",
        lambda head, _path: 1_000_000 if re.search(rb'"task":\s*"overflow_check"', head[:4096]) else 0,
        read_overflow,
        anywhere=False,
    ),
)
