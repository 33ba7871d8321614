"""Logs as they really are: cut, garbled, long. Nothing crashes, nothing hangs, no number is invented."""

from __future__ import annotations

import io
import json
import math
import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from harness.cli import app, arrange
from harness.errors import HarnessError
from harness.importers.base import Notes, formats
from harness.importers.fields import MEGATRON
from harness.importers.numbers import number
from harness.importers.reading import import_logs
from harness.importers.scan import BLOCK, scan
from harness.trace import read_jsonl, read_parquet, to_json_value
from tests.importers.test_formats import CASES, TRL, VERL, write
from tests.importers.test_formats import MEGATRON as MEGATRON_LOG

TEXT = {case: (form, text) for case, (form, _, text, _) in CASES.items()}
DIGITS = (
    re.compile(r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"),
    re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?"),
)


def held(text: str) -> set[float]:
    """Every number that stands in a text, also across a line break, and as a percentage."""
    joined = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    texts = (joined, joined.replace("\n", ""), joined.replace("\r", "").replace("\n", ""), joined.replace("\r", ""))
    found = {number(d) for t in texts for pattern in DIGITS for d in pattern.findall(t)}
    known = {abs(v) for v in found if v is not None}
    return known | {v / 100 for v in known}


def numbers_of(folder: Path, text: str, form: str) -> set[float]:
    try:
        runs = import_logs([write(folder, "fuzzed", text)], form).runs
    except HarnessError:
        return set()
    values = (v for t in runs.values() for m in t.metrics for v in t.column(m))
    return {abs(v) for v in values if v is not None and math.isfinite(v)}


@pytest.mark.parametrize("case", TEXT)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_cut_or_garbled_log_never_crashes_and_never_invents_a_number(
    case: str, tmp_path: Path, data: st.DataObject
) -> None:
    form, text = TEXT[case]
    at = data.draw(st.integers(0, len(text)))
    how = data.draw(st.sampled_from(["cut", "drop", "insert", "shuffle"]))
    if how == "cut":
        text = text[:at]
    elif how == "drop":
        text = text[:at] + text[at + data.draw(st.integers(1, 30)) :]
    elif how == "insert":
        text = (
            text[:at]
            + data.draw(st.text(st.characters(exclude_categories=["Nd", "Nl", "No", "Cs"]), max_size=20))
            + text[at:]
        )
    else:
        text = "".join(data.draw(st.permutations(text.splitlines(keepends=True))))
    assert numbers_of(tmp_path, text, form) <= held(text)


def by_step(folder: Path, text: str, form: str) -> dict[tuple[str, int], set[float | str | None]]:
    try:
        runs = import_logs([write(folder, "cut", text)], form).runs
    except HarnessError:
        return {}
    return {
        (r, s): {to_json_value(t.column(m)[i]) for m in t.metrics}
        for r, t in runs.items()
        for i, s in enumerate(t.steps)
    }


@pytest.mark.parametrize("case", [c for c in TEXT if c != "verl"])  # its second record is broken within a number
def test_the_beginning_of_a_log_says_nothing_that_the_whole_does_not(case: str, tmp_path: Path) -> None:
    form, text = TEXT[case]
    whole = by_step(tmp_path, text, form)
    anywhere = set[float | str | None]().union(*whole.values()) if case == "swift" else set()  # its step comes last
    for at in range(len(text)):
        for place, values in by_step(tmp_path, text[:at], form).items():
            assert values - {None} <= whole.get(place, anywhere), (at, text[:at][-40:])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=400))
def test_bytes_of_any_kind_are_refused_or_read(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(raw)
    for form in ("auto", *(f for f in formats() if f != "tensorboard")):
        assert refusal(path, form) is None or str(path) in str(refusal(path, form))


def refusal(path: Path, form: str) -> HarnessError | None:
    try:
        import_logs([str(path)], form)
    except HarnessError as e:
        return e
    return None


def test_a_long_log_is_read_in_constant_memory_with_the_right_lines() -> None:
    record = b" iteration  %d/ 100 | lm loss: 1.5 | \n"
    noise = b"x" * 199 + b"\n"

    class Long(io.RawIOBase):
        """Sixty megabytes: a record after every 10,000 lines of noise."""

        def __init__(self) -> None:
            self.left = 30

        def read(self, size: int = -1) -> bytes:
            if not self.left:
                return b""
            self.left -= 1
            return noise * 10_000 + record % (30 - self.left)

    tracemalloc.start()
    notes = Notes()
    found = [line for line, _ in scan(Long(), MEGATRON, notes)]  # type: ignore[arg-type]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [10_001 * k for k in range(1, 31)]
    assert notes.skipped["lines without a record"] == 300_000
    assert peak < 5 * BLOCK


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_a_record_across_two_blocks_is_whole(size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("harness.importers.scan.BLOCK", size)
    monkeypatch.setattr("harness.importers.scan.LONGEST", 600)
    for name, text in (("a", VERL), ("b", TRL), ("c", MEGATRON_LOG)):
        path = write(tmp_path, name, text)
        small = import_logs([path])
        monkeypatch.undo()
        usual = import_logs([path])
        assert small.to_json() == usual.to_json()
        monkeypatch.setattr("harness.importers.scan.BLOCK", size)
        monkeypatch.setattr("harness.importers.scan.LONGEST", 600)


def run(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, arrange(list(words))[0])
    if isinstance(found.exception, HarnessError):
        return found.exception.exit_code, str(found.exception)
    return found.exit_code, found.output


def test_the_command_writes_a_trace_and_json(tmp_path: Path) -> None:
    log, out = write(tmp_path, "a.log", VERL), tmp_path / "new" / "t.parquet"
    code, text = run("import", log, "--out", str(out), "--json=" + str(tmp_path / "a.json"))
    assert code == 0
    assert "verl-console" in text
    trace = read_parquet(out)
    assert trace.column("loss")[0] == 0.5
    assert math.isnan(trace.column("loss")[1] or 0)
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["schema"] == "harness/import@1"
    assert data["format"] == "verl-console"
    assert data["runs"][0]["metrics"]["loss"] == [0.5, "nan"]
    assert data["runs"][0]["metrics"]["reward"] == [0.125, None]
    assert next(iter(data["runs"][0]["metrics"])) == "loss"
    assert data["files"] == [str(out)]


def test_several_runs_are_several_files(tmp_path: Path) -> None:
    log = write(tmp_path, "a.log", CASES["pairs"][2])
    code, _ = run("import", log, "--out", str(tmp_path / "t.jsonl"))
    assert code == 0
    assert read_jsonl(tmp_path / "t-stage-0.jsonl").column("loss") == [3.5, 2.5]
    assert read_jsonl(tmp_path / "t-stage1.jsonl").column("loss") == [3.0, 2.0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.log"], "nowhere.log cannot be read: No such file or directory"),
        (["{log}", "--format", "verl-consol"], "verl-console"),
        (["{log}", "--map", "los=x"], "loss"),
        (["{log}", "--map", "loss"], "is not of the form canonical=native"),
        (["{log}", "--out", "t.txt"], "must end in .parquet or .jsonl"),
        (["{log}", "--format", "trl"], "no record of the format trl in it"),
    ],
)
def test_wrong_words_are_a_sentence_and_exit_2(words: list[str], said: str, tmp_path: Path) -> None:
    log = write(tmp_path, "a.log", VERL)
    code, text = run("import", *(w.format(log=log) for w in words))
    assert code == 2
    assert said in text
