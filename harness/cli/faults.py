"""``harness faults``: what can be injected, and how to add to it."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.common import Json, check_file, check_folder, clean_stdout, write_json, write_text
from harness.errors import UsageError, unknown

if TYPE_CHECKING:
    from harness.catalogue import Entry, FaultSpec, RemedySpec
    from harness.contract import Check

SCHEMA = "harness/faults@1"
CONTRACT = "harness/contract@1"
app = typer.Typer(no_args_is_help=True, help="List the faults, show one, write one, or check one.")


def describe(fault: FaultSpec) -> dict[str, Any]:
    """Return a fault as JSON data."""
    from harness.catalogue import remedy_for
    from harness.seams import describe_seam

    return {
        "name": fault.name,
        "family": fault.family,
        "seam": describe_seam(fault.seam),
        "mode": fault.mode,
        "seen_in": list(fault.seen_in),
        "expects": [str(claim) for claim in fault.expects],
        "severity": fault.severity,
        "remedy": remedy_for(fault),
        "needs": list(fault.needs),
        "summary": fault.summary,
        "moe": fault.moe,
        "engine": fault.engine,
        "options": dict(fault.defaults),
        "look_alikes": list(fault.look_alikes),
        "pair": fault.pair,
        "expected_verdict": fault.expected_verdict,
        "reason": fault.reason,
    }


def describe_remedy(remedy: RemedySpec) -> dict[str, Any]:
    """Return a remedy as JSON data."""
    from harness.seams import describe_seam

    return {
        "name": remedy.name,
        "seam": describe_seam(remedy.seam),
        "for": list(remedy.for_),
        "seen_in": list(remedy.seen_in),
        "needs": list(remedy.needs),
        "summary": remedy.summary,
        "engine": remedy.engine,
        "options": dict(remedy.defaults),
    }


@app.command("list")
def list_(
    family: Annotated[str | None, typer.Option("--family", help="Only this family.")] = None,
    seam: Annotated[
        str | None, typer.Option("--seam", help="Only at this place: a kind (module), a stage (loss), a role (router).")
    ] = None,
    moe: Annotated[bool, typer.Option("--moe", help="Only what a mixture of experts alone can have.")] = False,
    mode: Annotated[str | None, typer.Option("--mode", help="Only what shows in replay, or in free.")] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="Only what runs on this engine.")] = None,
    json: Json = None,
) -> None:
    """List the faults of the catalogue."""
    check_file(json)
    from harness.catalogue import catalogue

    faults = [f for f in catalogue().values() if not f.control or f.name == "noop"]
    chosen = [(f, describe(f)) for f in faults]
    for what, value, known in (
        ("family", family, {f.family for f in faults}),
        ("mode", mode, {"replay", "free"}),
        ("engine", engine, {"torch", "deepspeed"}),
    ):
        if value is not None and value not in known:
            raise unknown(what, value, known)
    if family is not None:
        chosen = [c for c in chosen if c[0].family == family]
    if mode is not None:
        chosen = [c for c in chosen if c[0].mode == mode]
    if engine is not None:
        chosen = [c for c in chosen if _runs_on(c[0], engine)]
    if moe:
        chosen = [c for c in chosen if c[0].moe]
    if seam is not None:
        words = {c[0].name: _words(c[1]["seam"]) for c in [(f, describe(f)) for f in faults]}
        if not _words(seam) <= set().union(*words.values()):
            raise unknown("seam", seam, set().union(*words.values()))
        chosen = [c for c in chosen if _words(seam) <= words[c[0].name]]
    if json is not None:
        write_json({"schema": SCHEMA, "faults": [data for _, data in chosen]}, json)
    if json == "-":
        return
    if not chosen:
        typer.echo("harness: no fault is all of that", err=True)
    width = max((len(f.name) for f, _ in chosen), default=0)
    for f, _ in sorted(chosen, key=lambda c: (c[0].family, c[0].name)):
        typer.echo(_filled(f"{f.family:<11} {f.name:<{width}}  ", f.summary))


def _runs_on(fault: FaultSpec, engine: str) -> bool:
    from harness.inject import stages_of
    from harness.rl.engines import OWNED

    free = not any(stage in OWNED[engine] for stage in stages_of(fault.seam))
    return fault.engine == engine if fault.engine is not None else free


def _words(seam: str) -> set[str]:
    return {"stage" if word == "stages" else word for word in re.findall(r"[\w.]+", seam)}


@app.command("remedies")
def remedies_(json: Json = None) -> None:
    """List the remedies."""
    check_file(json)
    from harness.catalogue import remedies

    found = list(remedies().values())
    if json is not None:
        write_json({"schema": SCHEMA, "remedies": [describe_remedy(r) for r in found]}, json)
    if json != "-":
        width = max((len(r.name) for r in found), default=0)
        for r in found:
            meant = f" For: {', '.join(r.for_)}." if r.for_ else ""
            typer.echo(_filled(f"{r.name:<{width}}  ", r.summary + meant))


@app.command("show")
def show(name: Annotated[str, typer.Argument(help="Name of a fault or remedy.")], json: Json = None) -> None:
    """Show everything that is known about a fault, or a remedy."""
    check_file(json)
    from harness.catalogue import FaultSpec, find_entry

    entry = find_entry(name)
    data = describe(entry) if isinstance(entry, FaultSpec) else describe_remedy(entry)
    if json is not None:
        key = "faults" if isinstance(entry, FaultSpec) else "remedies"
        write_json({"schema": SCHEMA, key: [{**data, "sections": entry.sections}]}, json)
    if json != "-":
        _show(entry, data)


def _show(entry: Entry, data: dict[str, Any]) -> None:
    typer.echo(f"{entry.name} ({entry.family})\n")
    typer.echo(_filled("", entry.summary) + "\n")
    for title, text in entry.sections.items():
        typer.echo(_filled(f"{title}: ", text, indent=4) + "\n")
    options = ", ".join(f"{k} = {v!r}" for k, v in entry.defaults.items()) or "none"
    rows = {"seam": data["seam"], "mode": entry.mode, "engine": entry.engine or "any", "options": options}
    if "for" in data:
        rows["for"] = ", ".join(data["for"])
    else:
        rows["severity"] = data["severity"] or "none"
        rows["needs"] = ", ".join(data["needs"]) or "nothing"
        rows["expects"] = "; ".join(data["expects"]) or "nothing"
        rows["verdict"] = f"{data['expected_verdict']} on {data['pair']}"
        rows["because"] = data["reason"]
        rows["remedy"] = data["remedy"] or "none but removing the fault"
        rows["look-alikes"] = ", ".join(data["look_alikes"]) or "none"
    for title, value in rows.items():
        if value:
            typer.echo(_filled(f"{title:<12} ", value))
    for url in entry.seen_in:
        typer.echo(f"{'seen in':<12} {url}")


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="Its name: the defect in lower-case words joined by underscores.")],
    family: Annotated[str | None, typer.Option("--family", help="Folder in which it goes.")] = None,
    seam: Annotated[
        str, typer.Option("--seam", help="Stages (loss), module:ROLE, operator:KIND, probe:METRIC, config:SECTION.KEY.")
    ] = "loss",
    mode: Annotated[str, typer.Option("--mode", help="Mode in which it shows: replay or free.")] = "replay",
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to write to; faults where a family is given.")
    ] = None,
) -> None:
    """Write the file of a new fault, with the parts to fill in."""
    from harness.catalogue import catalogue
    from harness.scaffold import source

    if mode not in ("replay", "free"):
        raise unknown("mode", mode, ("replay", "free"))
    text = source(name, seam, mode)
    families = {f.family for f in catalogue().values()}
    if family is not None and out is None and family not in families:
        raise unknown("family", family, families)
    root = out if out is not None else Path("faults" if family else ".")
    folder = root / family if family else root
    path = folder / f"{name}.py"
    if path.exists():
        raise UsageError(f"{path} exists already; nothing was written")
    check_folder(folder.absolute())
    write_text(path, text)
    if (root / "__init__.py").is_file() and not (folder / "__init__.py").exists():
        write_text(folder / "__init__.py", '"""Faults of this family."""\n')
    typer.echo(f"{path} is written; fill in its parts, then: harness faults check {path}")


@app.command("check")
def check(
    target: Annotated[str, typer.Argument(help="Name of a fault or remedy, or a Python file.", metavar="NAME|FILE")],
    json: Json = None,
) -> None:
    """Run the contract on a fault: exit code 0 if it is met, 1 if not."""
    check_file(json)
    from harness.catalogue import find_entry
    from harness.contract import check_fault, load_file

    with clean_stdout():
        is_file = target.endswith(".py") or "/" in target
        entries: list[Any] = list(load_file(Path(target))) if is_file else [find_entry(target)]
        found = {entry.name: check_fault(entry) for entry in entries}
    met = {name: all(c.outcome != "fail" for c in checks) for name, checks in found.items()}
    if json is not None:
        faults = [
            {"name": name, "met": met[name], "checks": [vars(c) for c in checks]} for name, checks in found.items()
        ]
        write_json({"schema": CONTRACT, "faults": faults}, json)
    if json != "-":
        for name, checks in found.items():
            _table(name, checks, met[name])
    raise typer.Exit(0 if all(met.values()) else 1)


@app.command("docs")
def docs(
    out: Annotated[Path, typer.Option("--out", help="Folder to write the pages to.")] = Path("docs/catalogue"),
    pictures: Annotated[
        bool, typer.Option("--pictures", help="Draw every fault on its pair too; runs what the store does not hold.")
    ] = False,
    only: Annotated[str | None, typer.Option("--only", help="With --pictures: draw this fault alone.")] = None,
) -> None:
    """Write the catalogue as pages: an index and a page per fault and remedy."""
    from harness import pages
    from harness.catalogue import catalogue, find

    check_folder(out.absolute())
    if pictures or only is not None:
        _draw(out, [find(only)] if only is not None else [f for f in catalogue().values() if not f.control])
    drawn = {path.stem for path in out.glob("*.svg")}
    for name in drawn - set(catalogue()):
        (out / f"{name}.svg").unlink()
    written = pages.pages(drawn)
    for name, text in written.items():
        write_text(out / name, text)
    for path in out.glob("*.md"):
        if path.name not in written and path.read_text(encoding="utf-8").startswith(pages.NOTE):
            path.unlink()  # the page of an entry that is gone
    typer.echo(f"{len(written)} pages, {len(drawn & set(catalogue()))} pictures: {out}")


def _draw(out: Path, faults: list[FaultSpec]) -> None:
    import os

    from harness import pages
    from harness.errors import HarnessError
    from harness.store import harness_home

    def drawn(fault: FaultSpec) -> None:
        try:
            svg = pages.picture(fault, harness_home(), workers=os.cpu_count() or 1)
        except HarnessError as e:
            typer.echo(f"harness: warning: no picture of {fault.name}: {e}", err=True)
        else:
            write_text(out / f"{fault.name}.svg", svg)

    with clean_stdout():
        for fault in faults:
            drawn(fault)


def _table(name: str, checks: list[Check], met: bool) -> None:
    typer.echo(name)
    for c in checks:
        typer.echo(_filled(f"  {c.outcome:<4}  {c.name:<16}  ", c.sentence))
    failed = sum(c.outcome == "fail" for c in checks)
    typer.echo(f"{name} meets its contract" if met else f"{name} does not meet its contract: {failed} checks failed")


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
