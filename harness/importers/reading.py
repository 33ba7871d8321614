"""The importer's spine: file -> format -> records -> runs -> traces, with what was skipped and what must be known."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from harness.errors import UsageError
from harness.importers import base
from harness.importers.base import Format, Notes, Record
from harness.importers.gather import gather, trace_of, with_canonical
from harness.importers.msprobe import members
from harness.importers.names import CANONICAL, NameMap, load
from harness.importers.scan import Settled
from harness.trace import Trace, to_json_value

SCHEMA = "harness/import@1"
HEAD = 1 << 20
SEARCHED = 1 << 26
"""Bytes in which the first record is looked for."""


@dataclass(frozen=True)
class Imported:
    """What one or more logs hold.

    Attributes:
        form: Name of the format; several, joined by "+", if the files differ.
        runs: Traces by label, in order.
        notes: What was skipped, and warnings.
    """

    form: str
    runs: Mapping[str, Trace]
    notes: Notes

    def to_json(self) -> dict[str, Any]:
        """Return JSON data; non-finite numbers are the strings "nan", "inf", "-inf", a missing value is None."""
        runs = [
            {
                "label": label,
                "steps": list(trace.steps),
                "metrics": {m: [to_json_value(v) for v in trace.column(m)] for m in _ordered(trace.metrics)},
            }
            for label, trace in self.runs.items()
        ]
        skipped = dict(self.notes.skipped)
        return {
            "schema": SCHEMA,
            "format": self.form,
            "runs": runs,
            "skipped": skipped,
            "warnings": list(self.notes.warnings),
        }


def _ordered(metrics: Iterable[str]) -> list[str]:
    names = list(metrics)
    return [m for m in CANONICAL if m in names] + [m for m in names if m not in CANONICAL]


def import_logs(paths: Sequence[str], form: str = "auto", chosen: Mapping[str, str] | None = None) -> Imported:
    """Read logs.

    Args:
        paths: Files; for the formats that are not files, what ``mlflow:RUN`` names.
        form: Name of a format, or ``auto``.
        chosen: Native name by canonical name, where the map of names is to be overruled.

    Raises:
        UsageError: If a file cannot be read, holds no record, is ambiguous, or lacks a chosen metric.
    """
    notes, runs, used = Notes(), {}, []
    for path in paths:
        if path.startswith("mlflow:"):
            used.append("mlflow")
            found = {path: _mlflow(path.removeprefix("mlflow:"), chosen or {})}
        else:
            one, found = _import(Path(path), form, chosen or {}, notes)
            used.append(one.name)
        for label, trace in found.items():
            name = label if len(paths) == 1 else f"{Path(path).name} {label}".strip()
            while name in runs:
                name += "'"
            runs[name or Path(path).name] = trace
    return Imported("+".join(dict.fromkeys(used)), runs, notes)


def _import(path: Path, form: str, chosen: Mapping[str, str], notes: Notes) -> tuple[Format, dict[str, Trace]]:
    try:
        one, files = _format(path, form)
        names = load(one.names).with_choices(chosen)
        records = (record for file in files for record in _records(file, one, notes))
        runs = gather(records, one, names, notes, str(path))
    except (OSError, EOFError) as e:
        raise UsageError(f"{path} cannot be read: {getattr(e, 'strerror', None) or e}") from e
    if not runs:
        raise UsageError(f"{path}: no record of the format {one.name} in it" + _because(notes))
    traces = {run.label: trace_of(run, names) for run in runs}
    for canonical, native in chosen.items():
        if not any(native in trace.metrics for trace in traces.values()):
            there = sorted({m for trace in traces.values() for m in trace.metrics})
            raise UsageError(f"{path}: --map {canonical}={native}: no such metric; there are {', '.join(there)}")
    for sentence in _doubts(one, names, traces.values()):
        notes.warn(sentence)
    return one, traces


def _format(path: Path, form: str) -> tuple[Format, list[Path]]:
    """Return the format of a log and the files that it consists of: itself, or what a folder holds."""
    if path.is_dir():
        found = members(path)
        if found is None or form not in ("auto", found[0]):
            raise UsageError(f"{path} is a folder that no known tool wrote; name its files")
        return base.find(found[0]), found[1]
    if form != "auto":
        return base.find(form), [path]
    with _open(path) as file:
        return base.detect(path, _blocks(file)), [path]


def _records(path: Path, form: Format, notes: Notes) -> Iterator[Record]:
    with _open(path) as file:
        yield from form.read(cast(BinaryIO, Settled(file, notes)), notes, path)


def _mlflow(run: str, chosen: Mapping[str, str]) -> Trace:
    """Read a run of the MLflow store that ``MLFLOW_TRACKING_URI`` names, or of the harness's own."""
    from harness.store import harness_home
    from harness.tracking import read_run, tracking_uri

    trace = read_run(tracking_uri(harness_home()), run)
    columns = {m: trace.column(m) for m in trace.metrics}
    return with_canonical(trace.steps, columns, load("any").with_choices(chosen))


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the beginning of a file, then whole lines of what follows, up to ``SEARCHED`` bytes."""
    size = 0
    while size < SEARCHED and (block := file.read(HEAD)):
        block += file.readline(HEAD)
        size += len(block)
        yield block


def _because(notes: Notes) -> str:
    told = ", ".join(f"{count} {reason}" for reason, count in notes.skipped.items())
    return f" (skipped: {told})" if told else ""


def _doubts(form: Format, names: NameMap, traces: Iterable[Trace]) -> Iterable[str]:
    """Say what the numbers may hide."""
    yield from form.warnings
    for trace in traces:
        losses = [v for v in trace.column("loss") if v is not None]
        sick = any(v is not None and not math.isfinite(v) for v in trace.column("grad_norm"))
        if form.hides and losses and all(math.isfinite(v) for v in losses):
            told = "; the gradient norm is not finite in this run" if sick else ""
            yield (
                "the HF Trainer replaces NaN and infinite losses by the running mean unless logging_nan_inf_filter is "
                f"off, so a finite loss here does not show a healthy run{told}"
            )
        if form.places is not None:
            zero = [m for m in trace.metrics if m in names.natives and any(v == 0 for v in trace.column(m))]
            if zero:
                yield (
                    f"values are printed with {form.places} decimals: a 0 of {', '.join(zero)} is anything below "
                    f"{0.5 * 10**-form.places:g}"
                )
        for metric in trace.metrics:
            if ("ratio" in metric or metric == "grad_norm") and any(v == -1.0 for v in trace.column(metric)):
                yield f"{metric} is exactly -1 in places: it may stand for a value that was not computed; kept as it is"
