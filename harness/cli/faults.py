"""``harness faults``: what can be injected."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.common import Json, check_file, write_json
from harness.errors import unknown

if TYPE_CHECKING:
    from harness.catalogue import FaultSpec

SCHEMA = "harness/faults@1"
app = typer.Typer(no_args_is_help=True, help="List the faults, or show one.")


def describe(fault: FaultSpec) -> dict[str, Any]:
    """Return a fault as JSON data."""
    from harness.seams import describe_seam

    return {
        "name": fault.name,
        "family": fault.family,
        "seam": describe_seam(fault.seam),
        "mode": fault.mode,
        "seen_in": list(fault.seen_in),
        "expects": [str(claim) for claim in fault.expects],
        "severity": fault.severity,
        "remedy": None,
        "needs": list(fault.needs),
        "summary": fault.summary,
        "moe": fault.moe,
        "engine": fault.engine,
        "options": dict(fault.defaults),
        "look_alikes": list(fault.look_alikes),
    }


@app.command("list")
def list_(
    family: Annotated[str | None, typer.Option("--family", help="Only this family.")] = None, json: Json = None
) -> None:
    """List the faults of the catalogue."""
    check_file(json)
    from harness.catalogue import catalogue

    faults = [f for f in catalogue().values() if not f.control or f.name == "noop"]
    families = sorted({f.family for f in faults})
    if family is not None:
        if family not in families:
            raise unknown("family", family, families)
        faults = [f for f in faults if f.family == family]
    if json is not None:
        write_json({"schema": SCHEMA, "faults": [describe(f) for f in faults]}, json)
    if json == "-":
        return
    width = max(len(f.name) for f in faults)
    for f in sorted(faults, key=lambda f: (f.family, f.name)):
        typer.echo(_filled(f"{f.family:<11} {f.name:<{width}}  ", f.summary))


@app.command("show")
def show(name: Annotated[str, typer.Argument(help="Name of a fault.")], json: Json = None) -> None:
    """Show everything that is known about a fault."""
    check_file(json)
    from harness.catalogue import find

    fault = find(name)
    data = describe(fault)
    if json is not None:
        write_json({"schema": SCHEMA, "faults": [{**data, "sections": fault.sections}]}, json)
    if json != "-":
        _show(fault, data)


def _show(fault: FaultSpec, data: dict[str, Any]) -> None:
    typer.echo(f"{fault.name} ({fault.family})\n")
    typer.echo(_filled("", fault.summary) + "\n")
    for title, text in fault.sections.items():
        typer.echo(_filled(f"{title}: ", text, indent=4) + "\n")
    options = ", ".join(f"{k} = {v!r}" for k, v in fault.defaults.items()) or "none"
    for title, value in {
        "seam": data["seam"],
        "mode": fault.mode,
        "engine": fault.engine or "any",
        "options": options,
        "severity": fault.severity or "none",
        "expects": "; ".join(data["expects"]) or "nothing",
        "look-alikes": ", ".join(fault.look_alikes) or "none",
    }.items():
        typer.echo(f"{title:<12} {value}")
    for url in fault.seen_in:
        typer.echo(f"{'seen in':<12} {url}")


def _filled(start: str, text: str, indent: int | None = None) -> str:
    """Return text that starts with ``start``, folded to a terminal's width; one line where it is piped."""
    if not sys.stdout.isatty():
        return start + text
    hanging = " " * (len(start) if indent is None else indent)
    return textwrap.fill(
        text,
        width=max(shutil.get_terminal_size().columns, len(hanging) + 20),
        initial_indent=start,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
