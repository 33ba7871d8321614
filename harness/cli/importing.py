"""``harness import``: other people's logs as traces."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.common import Json, check_file, check_folder, write_json
from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.importers.reading import Imported


def import_(
    logs: Annotated[list[str], typer.Argument(help="Log files; mlflow:RUN_ID for a run of the MLflow store.")],
    form: Annotated[
        str, typer.Option("--format", help="Format of the logs; `list` shows those that are known.")
    ] = "auto",
    choose: Annotated[
        list[str] | None, typer.Option("--map", help="canonical=native, for example loss=actor/pg_loss.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Trace to write, .parquet or .jsonl.")] = None,
    json: Json = None,
) -> None:
    """Read logs of other frameworks into traces. What the log does not hold is absent, never invented."""
    check_file(json)
    from harness.importers.base import formats

    if form == "list" or logs == ["list"]:
        for one in formats().values():
            typer.echo(f"{one.name:18s} {one.summary}")
        return
    if out is not None:
        if out.suffix not in (".parquet", ".jsonl"):
            raise UsageError(f"--out {out}: the name must end in .parquet or .jsonl")
        check_folder(out.absolute().parent)
    from harness.importers.names import choices
    from harness.importers.reading import import_logs

    found = import_logs(logs, form, choices(choose or []))
    written = [] if out is None else _write(found, out)
    if json is not None:
        write_json({**found.to_json(), "files": [str(p) for p in written]}, json)
    if json != "-":
        _show(found, written)


def _write(found: Imported, out: Path) -> list[Path]:
    """Write one file per run; several get the run's label into their name."""
    from harness.trace import TraceWriter, write_parquet

    written: list[Path] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    for number, (label, trace) in enumerate(found.runs.items(), start=1):
        name = re.sub(r"[^\w.-]+", "-", label).strip("-.") or str(number)
        path = out if len(found.runs) == 1 else out.with_name(f"{out.stem}-{name}{out.suffix}")
        if path in written:
            path = out.with_name(f"{out.stem}-{number}-{name}{out.suffix}")
        if path.suffix == ".parquet":
            write_parquet(trace, path)
        else:
            temporary = path.with_name(f".{path.name}.tmp")
            with TraceWriter(temporary) as writer:
                for record in trace:
                    writer.write(record)
            temporary.replace(path)
        written.append(path)
    return written


def _show(found: Imported, written: list[Path]) -> None:
    from rich.console import Console
    from rich.table import Table

    from harness.importers.names import CANONICAL
    from harness.trace import to_json_value

    def cell(value: float | None) -> str:
        plain = to_json_value(value)
        return "missing" if plain is None else plain if isinstance(plain, str) else f"{plain:.6g}"

    console = Console()
    for label, trace in found.runs.items():
        span = f"steps {trace.steps[0]} to {trace.steps[-1]}"
        table = Table(title=f"{label or 'run'}: {found.form}, {len(trace)} records, {span}")
        for column in ("metric", "records", "first", "last"):
            table.add_column(column, justify="left" if column == "metric" else "right")
        for metric in CANONICAL:
            values = trace.column(metric)
            if metric in trace.metrics:
                count = sum(v is not None for v in values)
                table.add_row(metric, str(count), cell(values[0]), cell(values[-1]))
        native = [m for m in trace.metrics if m not in CANONICAL]
        console.print(table)
        console.print(f"{len(native)} native metrics: {', '.join(native[:12])}{' ...' if len(native) > 12 else ''}")
    for reason, count in found.notes.skipped.items():
        typer.echo(f"skipped: {count} {reason}", err=True)
    for sentence in found.notes.warnings:
        typer.echo(f"warning: {sentence}", err=True)
    for path in written:
        typer.echo(f"wrote {path}")
