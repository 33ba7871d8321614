"""What goes to standard output, to standard error and to files, and in which order."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import cli, tracking
from harness.cli import common
from harness.errors import UsageError
from harness.fleet import Failure
from tests.cli import fakes
from tests.cli.test_run import fake, run

__all__ = ["fake"]  # a fixture


def argv(tmp_path: Path, *more: str) -> list[str]:
    return ["run", "--fault", "grad_overflow", "--out", str(tmp_path / "out"), *more]


def test_what_others_print_does_not_reach_standard_output(
    fake: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def noisy() -> Any:
        print("from a library")  # noqa: T201
        os.write(1, b"from a worker\n")
        subprocess.run(["echo", "from a process"], check=True)
        return fakes.experiment(tmp_path / "runs")

    fake["make"] = noisy
    code, out, err = run(argv(tmp_path, "--json"), capfd)
    assert code == 0
    assert json.loads(out)["verdict"] == "REPRODUCED"
    assert {"from a library", "from a worker", "from a process"} <= set(err.splitlines())


def test_a_bare_json_may_stand_anywhere_and_nothing_behind_two_dashes_is_touched() -> None:
    assert cli.arrange(["--json", "run", "--debug"]) == (["--debug", "--json=-", "run"], True)
    assert cli.arrange(["run", "--json=x", "--", "--json", "--debug"]) == (
        ["run", "--json=x", "--", "--json", "--debug"],
        False,
    )
    assert cli.arrange([]) == ([], False)


def test_the_result_is_on_disk_before_mlflow_is_asked(
    fake: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(tracking, "log_experiment", interrupted)
    code, _, err = run(argv(tmp_path), capsys)
    assert code == 130
    assert err == common.INTERRUPTED + "\n"
    assert json.loads((tmp_path / "out" / "fidelity.json").read_text())["verdict"] == "REPRODUCED"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["fidelity.json", "report.html"]


def test_any_error_of_the_log_is_a_warning(
    fake: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(tracking, "log_experiment", broken)
    code, _, err = run(argv(tmp_path), capsys)
    assert code == 0
    where = tmp_path / "out"
    assert err == f"harness: warning: MLflow logging failed: RuntimeError: two lines; the result is in {where}\n"


def test_failures_are_named_and_explained_under_debug(
    fake: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = Failure("k", "proxy/clean seed 1", "ValueError: no", "error", "Traceback of the worker")
    fake["make"] = lambda: replace(fakes.experiment(tmp_path, crash=True), failures=(failure,))
    code, out, err = run(argv(tmp_path), capsys)
    assert code == 3
    assert "CRASHED: proxy/clean seed 1 failed: ValueError: no" in out
    assert err == "harness: proxy/clean seed 1: ValueError: no (error)\n"
    assert run(argv(tmp_path, "--debug"), capsys)[2] == err + "Traceback of the worker\n"


def test_names_are_printed_as_they_are(
    fake: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = fakes.experiment(tmp_path / "runs")
    pair = found.request.pair.model_copy(update={"name": "[bold]x[/] :boom:"})
    assert found.report is not None
    report = replace(found.report, reason="[red]because[/] :boom: 1.5")
    fake["make"] = lambda: replace(found, request=replace(found.request, pair=pair), report=report)
    _, out, _ = run(argv(tmp_path), capsys)
    assert "grad_overflow on [bold]x[/] :boom: (replay)" in out
    assert "REPRODUCED: [red]because[/] :boom: 1.5" in out


def test_the_table_tells_structural_from_not_measured(
    fake: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: dict[str, list[str]] = {}
    for line in run(argv(tmp_path), capsys)[1].splitlines():
        first, *rest = line.split() or [""]
        rows.setdefault(first, rest)
    assert rows["grad_norm"] == ["becomes", "inf,", "8", "becomes", "inf,", "8", "+0", "1.00"]
    assert rows["reward"] == ["structural", "structural"]
    assert rows["kl"] == ["not", "measured", "not", "measured"]
    assert rows["loss"] == ["none", "none"]
    assert rows["parameters"] == ["1,000", "500", "0.50"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    common.write_json({"a": [float("nan"), float("inf"), -float("inf"), -0.0, None], 1: (True, "é")}, str(path))
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": ["nan", "inf", "-inf", -0.0, None], "1": [True, "é"]}
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UsageError, match=r"x\.json cannot be written \(No space left on device\)"):
        common.write_json({}, str(path))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
