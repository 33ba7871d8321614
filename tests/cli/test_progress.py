from __future__ import annotations

import io
from typing import Any

import pytest

from harness.cli import progress as module
from harness.cli.progress import TOTAL, Progress, progress
from harness.fleet import Event


class Bars:
    """Keeps the lines that are on the screen: description -> (completed, total)."""

    def __init__(self) -> None:
        self.tasks: dict[int, list[Any]] = {}
        self.count = 0

    def add_task(self, what: str, total: int | None) -> int:
        self.count += 1
        self.tasks[self.count] = [what, 0, total]
        return self.count

    def update(self, task: int, completed: int, total: int | None) -> None:
        self.tasks[task][1:] = [completed, total]

    def advance(self, task: int) -> None:
        self.tasks[task][1] += 1

    def remove_task(self, task: int) -> None:
        del self.tasks[task]

    @property
    def lines(self) -> list[tuple[Any, ...]]:
        return [tuple(line) for line in self.tasks.values()]


def test_stages_follow_one_another_and_end_when_the_arms_begin() -> None:
    bars = Bars()
    shown = Progress(bars)
    shown.prepare("training the original", 0, 900)
    shown.prepare("training the original", 450, 900)
    assert bars.lines == [("training the original", 450, 900)]
    shown.prepare("scoring both models", 0, 1)
    assert bars.lines == [("scoring both models", 0, 1)]
    shown.arm(Event("start", "k", "original/clean seed 0"))
    assert bars.lines == [(TOTAL, 0, None), ("original/clean seed 0", 0, None)]


def test_one_line_per_running_arm_and_a_total() -> None:
    bars = Bars()
    shown = Progress(bars)
    for key in "ab":
        shown.arm(Event("start", key, f"arm {key}"))
    shown.arm(Event("step", "a", "arm a", 3, 24))
    assert bars.lines == [(TOTAL, 0, None), ("arm a", 3, 24), ("arm b", 0, None)]
    shown.arm(Event("done", "a", "arm a"))
    shown.arm(Event("retry", "b", "arm b"))
    assert bars.lines == [(TOTAL, 1, None)]
    shown.arm(Event("start", "b", "arm b"))
    shown.arm(Event("failed", "b", "arm b"))
    shown.arm(Event("failed", "c", "arm c"))  # skipped: it never started
    assert bars.lines == [(TOTAL, 3, None)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "quiet", "visible"),
    [
        (Terminal, {}, False, True),
        (Terminal, {}, True, False),
        (Terminal, {"CI": "true"}, False, False),
        (io.StringIO, {}, False, False),
    ],
)
def test_shown_only_on_a_terminal(
    stream: type[io.StringIO],
    environment: dict[str, str],
    quiet: bool,
    visible: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stderr = stream()
    monkeypatch.setattr(module.sys, "stderr", stderr)
    with progress(quiet=quiet) as shown:
        shown.prepare("training the original", 1, 2)
        shown.arm(Event("start", "k", "original/clean [x] seed 0"))
    assert ("original/clean [x] seed 0" in stderr.getvalue()) == visible
    assert bool(stderr.getvalue()) == visible


def test_no_color_means_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    seen = {}
    for name in ("", "1"):
        monkeypatch.setenv("NO_COLOR", name)
        stderr = Terminal()
        monkeypatch.setattr(module.sys, "stderr", stderr)
        with progress(quiet=False) as shown:
            shown.prepare("training the original", 1, 2)
        seen[name] = "\x1b[38;5" in stderr.getvalue() or "\x1b[3" in stderr.getvalue()
    assert seen == {"": True, "1": False}
