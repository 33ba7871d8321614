"""What several commands share: JSON output, progress on a terminal, and ``--set``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.errors import UsageError, unknown

if TYPE_CHECKING:
    from harness.fleet import Event

Json = Annotated[
    str | None,
    typer.Option("--json", metavar="[=FILE]", help="Write JSON to FILE, or to standard output in place of the table."),
]


def write_json(data: Mapping[str, Any], target: str) -> None:
    """Write JSON to a file, whole or not at all, or to standard output for ``-``."""
    text = json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False)
    if target == "-":
        typer.echo(text)
        return
    write_text(Path(target), text + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all.

    Raises:
        UsageError: If it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as e:
        raise UsageError(f"{path} cannot be written ({e.strerror})") from e


def parse_settings(words: list[str], groups: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Parse ``group.key=value`` words; values are YAML scalars.

    Raises:
        UsageError: If a word is not of that form or its group does not exist.
    """
    import yaml

    found: dict[str, dict[str, Any]] = {group: {} for group in groups}
    for word in words:
        path, equals, value = word.partition("=")
        group, dot, key = path.partition(".")
        if not equals or not dot or not key:
            raise UsageError(f"--set {word!r} is not of the form group.key=value, for example fault.severity=2")
        if group not in groups:
            raise unknown("group in --set:", group, groups)
        try:
            found[group][key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UsageError(f"--set {word!r}: the value is not a YAML scalar") from None
        if isinstance(found[group][key], str):
            found[group][key] = _as_number(found[group][key])
    return found


def _as_number(text: str) -> Any:
    """YAML 1.1 takes 1e-4 for a string; people mean the number."""
    try:
        return float(text)
    except ValueError:
        return text


class Progress:
    """Progress on standard error, if that is a terminal; else nothing."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._tasks: dict[str, Any] = {}

    def prepare(self, what: str, done: int, total: int) -> None:
        """Show the progress of making the two models."""
        self._show(what, what, done, total)

    def arm(self, event: Event) -> None:
        """Show the progress of the arms."""
        if event.kind in ("start", "step"):
            self._show(event.key, event.label, event.step, event.total or None)
        elif event.kind in ("done", "failed", "retry") and event.key in self._tasks:
            self._bars.remove_task(self._tasks.pop(event.key))

    def _show(self, key: str, label: str, done: int, total: int | None) -> None:
        if self._bars is None:
            return
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(label, total=total)
        self._bars.update(self._tasks[key], completed=done, total=total)
        if total is not None and done >= total and key == label:
            self._bars.remove_task(self._tasks.pop(key))


@contextmanager
def progress(*, quiet: bool) -> Iterator[Progress]:
    """Show progress while the block runs."""
    if quiet or not sys.stderr.isatty() or os.environ.get("CI"):
        yield Progress(None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        yield Progress(bars)
