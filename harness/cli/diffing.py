"""``harness diff``: two configurations, what differs, and how often such a difference causes trouble."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.common import Json, check_file, write_json

if TYPE_CHECKING:
    from harness.configs.diff import Difference

SCHEMA = "harness/diff@1"


def diff(
    a: Annotated[Path, typer.Argument(help="YAML or JSON, or a checkpoint folder.")],
    b: Annotated[Path, typer.Argument(help="The other one.")],
    version_a: Annotated[
        list[str] | None, typer.Option("--version-a", help="package=version that A ran with, to know its defaults.")
    ] = None,
    version_b: Annotated[list[str] | None, typer.Option("--version-b", help="The same for B.")] = None,
    json: Json = None,
) -> None:
    """Compare configurations (HF or TRL arguments, verl, DeepSpeed, model, our own), the most suspicious keys first.

    Exit code 0 if nothing differs, 1 if something does.
    """
    check_file(json)
    from harness.configs.diff import compare, parse_versions
    from harness.configs.read import read_config

    versions = parse_versions(version_a or []), parse_versions(version_b or [])
    left, right = read_config(a), read_config(b)
    found = compare(left, right, versions)
    warnings = [f"{c.path}: {w}" for c in (left, right) for w in c.warnings]
    if left.kind != right.kind and {left.kind, right.kind} != {"hf", "grpo"}:
        warnings.append(
            f"a {left.kind} and a {right.kind} configuration: only keys known to mean the same are compared"
        )
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "kinds": [left.kind, right.kind],
        "differences": [d.to_json() for d in found],
        "warnings": warnings,
    }
    if json is not None:
        write_json(data, json)
    if json != "-":
        _show(found, warnings)
    raise typer.Exit(1 if found else 0)


def _show(found: list[Difference], warnings: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not found:
        typer.echo("no difference")
    else:
        table = Table(
            title=f"{len(found)} differences; reports: failures in the wild that such a setting caused or hid"
        )
        for column in ("reports", "key", "A", "B", "why"):
            table.add_column(column, overflow="fold")
        for d in found:
            cells = [_cell(v, origin) for v, origin in zip((d.a, d.b), d.origins, strict=True)]
            table.add_row(
                str(d.setting.reports) if d.setting else "", d.key, *cells, d.setting.why if d.setting else ""
            )
        Console().print(table)
    for sentence in warnings:
        typer.echo(f"note: {sentence}", err=True)


def _cell(value: Any, origin: str) -> str:
    from harness.configs.diff import Unset

    if isinstance(value, Unset):
        return value.says
    return str(value) if origin == "file" else f"{value} ({origin})"
