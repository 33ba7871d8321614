"""Progress on standard error: one line per running arm and a total, on a terminal only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.fleet import Event

TOTAL = "arms done"


class Progress:
    """Lines that come and go; without ``bars`` (a ``rich.progress.Progress``) nothing is shown."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._stage: tuple[str, Any] | None = None
        self._arms: dict[str, Any] = {}
        self._total: Any = None
        self._expected = 0

    def prepare(self, what: str, done: int, total: int) -> None:
        """Show how far the making of the two models is; a stage ends when the next begins."""
        if self._bars is None:
            return
        if self._stage is None or self._stage[0] != what:
            self._end_stage()
            self._stage = (what, self._bars.add_task(what, total=total or None))
        self._bars.update(self._stage[1], completed=done, total=total or None)

    def arm(self, event: Event) -> None:
        """Show how far the arms are."""
        if self._bars is None:
            return
        self._end_stage()
        if self._total is None:
            self._total = self._bars.add_task(TOTAL, total=None)
        if event.kind == "queued":
            self._expected += event.total
            self._bars.update(self._total, total=self._expected)
            return
        if event.kind in ("start", "step"):
            if event.key not in self._arms:
                self._arms[event.key] = self._bars.add_task(event.label, total=event.total or None)
            self._bars.update(self._arms[event.key], completed=event.step, total=event.total or None)
            return
        if event.key in self._arms:
            self._bars.remove_task(self._arms.pop(event.key))
        if event.kind in ("done", "failed"):
            self._bars.advance(self._total)

    def _end_stage(self) -> None:
        if self._stage is not None:
            self._bars.remove_task(self._stage[1])
            self._stage = None


@contextmanager
def progress(*, quiet: bool) -> Iterator[Progress]:
    """Show progress while the block runs, unless ``quiet``, under CI, or where standard error is not a terminal."""
    if quiet or not sys.stderr.isatty() or os.environ.get("CI"):
        yield Progress(None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Standard output is left alone: the table goes there once the bars are gone.
    with Bars(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bars:
        yield Progress(bars)
