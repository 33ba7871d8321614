from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import cli, experiment, tracking
from harness.cli.run import build_request
from harness.errors import MachineError, UsageError
from harness.spec import load_pair
from harness.trace import read_parquet
from tests.cli import fakes


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as e:
        cli.main(argv)
    out, err = capsys.readouterr()
    assert isinstance(e.value.code, int | None)
    return e.value.code or 0, out, err


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the experiment and MLflow; the request that was made is kept."""
    seen: dict[str, Any] = {"make": lambda: fakes.experiment(tmp_path / "runs")}

    def reproduce(request: Any, home: Path, **_: Any) -> Any:
        seen["request"] = request
        return seen["make"]()

    monkeypatch.setattr(experiment, "reproduce", reproduce)
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path / "home"))
    reference = tracking.TrackingRef("sqlite:///x.db", "harness/tiny-qwen3-moe", "abc")
    monkeypatch.setattr(tracking, "log_experiment", lambda *_, **kw: seen.update(logged=kw) or reference)
    return seen


def test_table_verdict_and_paths(fake: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["run", "--fault", "grad_overflow", "--out", str(tmp_path / "out")], capsys)
    assert code == 0
    assert err == ""
    assert "REPRODUCED: fidelity" in out
    assert "becomes inf" in out
    assert f"report: {tmp_path}/out/report.html" in out
    assert "MLflow: sqlite:///x.db run abc" in out
    assert "original 11.3" in out
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith(("report", "MLflow")))
    assert (tmp_path / "out" / "report.html").exists()
    assert fake["logged"]["tags"]["verdict"] == "REPRODUCED"
    assert len(fake["logged"]["arms"]) == 24


def test_json_has_the_promised_shape(fake: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["run", "--fault", "grad_overflow", "--out", str(tmp_path / "out"), "--json"], capsys)
    assert code == 0
    data = json.loads(out, parse_constant=pytest.fail)
    assert data["schema"] == "harness/fidelity@1"
    assert (data["fault"], data["pair"], data["mode"]) == ("grad_overflow", "tiny-qwen3-moe", "replay")
    assert data["fired"] == {"original": 48, "proxy": 48}
    assert data["fidelity"]["ci"][0] <= data["fidelity"]["overall"] <= data["fidelity"]["ci"][1]
    assert data["fidelity"]["reward"] is None
    assert data["symptoms"]["original"]["grad_norm"]["kind"] == "nonfinite"
    assert data["symptoms"]["proxy"]["grad_norm"]["onset"] == fakes.ONSET
    assert data["symptoms"]["proxy"]["grad_norm"]["size"] == "inf"
    assert data["severity_to_trip"] == {"original": 11.3, "proxy": None}
    assert data["cost"]["ratio"] == {"seconds_per_step": 0.5, "peak_rss_mb": 0.5, "parameters": 0.5}
    first = next(r for r in data["runs"] if r["arm"] == "original/faulted" and r["seed"] == 1)
    assert read_parquet(first["trace"]).digest() == first["digest"]
    assert data["mlflow"] == {"tracking_uri": "sqlite:///x.db", "experiment": "harness/tiny-qwen3-moe", "run_id": "abc"}
    assert data["report"] == str(tmp_path / "out" / "report.html")
    assert "torch" in data["versions"]
    assert json.loads((tmp_path / "out" / "fidelity.json").read_text()) == data


def test_json_to_a_file_keeps_the_table(
    fake: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "result.json"
    argv = ["run", "--fault", "grad_overflow", "--out", str(tmp_path / "out"), f"--json={target}"]
    code, out, _ = run(argv, capsys)
    assert code == 0
    assert "REPRODUCED" in out
    assert json.loads(target.read_text())["verdict"] == "REPRODUCED"


@pytest.mark.parametrize(
    ("changes", "verdict", "status"),
    [({"crash": True}, "CRASHED", 3), ({"seeds": 1}, "INCONCLUSIVE", 4)],
)
def test_exit_status_follows_the_verdict(
    fake: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    verdict: str,
    status: int,
) -> None:
    fake["make"] = lambda: fakes.experiment(tmp_path / "runs", **changes)
    code, out, _ = run(["run", "--fault", "grad_overflow", "--out", str(tmp_path / "out")], capsys)
    assert (code, verdict in out) == (status, True)
    assert json.loads((tmp_path / "out" / "fidelity.json").read_text())["verdict"] == verdict


@pytest.mark.parametrize(
    ("verdict", "status"),
    [
        ("REPRODUCED", 0),
        ("PARTIAL", 1),
        ("NOT_REPRODUCED", 1),
        ("NO_EFFECT", 1),
        ("VOID", 1),
        ("CRASHED", 3),
        ("INCONCLUSIVE", 4),
    ],
)
def test_every_verdict_has_its_status(
    verdict: Any, status: int, fake: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = fakes.experiment(tmp_path / "runs")
    assert found.report is not None
    fake["make"] = lambda: replace(found, report=replace(found.report, verdict=verdict))
    code, out, _ = run(["run", "--fault", "grad_overflow", "--out", str(tmp_path / "out"), "--json"], capsys)
    assert (code, json.loads(out)["verdict"]) == (status, verdict)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--fault", "grad_overflw"], "unknown fault 'grad_overflw'; did you mean 'grad_overflow'"),
        (["--fault", "noop", "--pair", "tiny-qwen"], "unknown pair 'tiny-qwen'; did you mean 'tiny-qwen3-moe'"),
        (["--fault", "grad_overflow", "--set", "fault.multiplyer=2"], "did you mean 'multiplier'"),
        (["--fault", "grad_overflow", "--set", "fault.multiplier=many"], "must be float (default 65536.0), got 'many'"),
        (["--fault", "grad_overflow", "--set", "rl.betta=2"], "did you mean 'rl.beta'"),
        (["--fault", "grad_overflow", "--set", "faults.x=2"], "did you mean 'fault'"),
        (["--fault", "grad_overflow", "--set", "x"], "not of the form group.key=value"),
        (["--fault", "noop", "--set", "fault.severity=2"], "has no severity"),
        (["--fault", "noop", "--set", "schedule.every=0"], "every >= 1"),
        (
            ["--fault", "noop", "--set", "schedule.untl=9"],
            "unknown key in --set schedule: 'untl'; did you mean 'until'",
        ),
        (["--fault", "noop", "--set", "schedule.until=soon"], "schedule.until must be a whole number, got 'soon'"),
        (["--fault", "noop", "--set", "schedule.onset=true"], "schedule.onset must be a whole number, got True"),
        (["--fault", "noop", "--steps", "4"], "with --steps 4 the pair's onset 8 is never reached; add --onset"),
        (["--fault", "grad_overflow", "--set", "fault.severity=.inf"], "the value must be finite"),
        (["--fault", "grad_overflow", "--set", "fault.severity=[1"], "the value is not a YAML scalar"),
        (
            ["--fault", "grad_overflow", "--set", "fault.severity=2", "--set", "fault.multiplier=3"],
            "fault.severity and fault.multiplier are one option of fault grad_overflow",
        ),
        (["--fault", "noop", "--set", "rl.trainer.dtyp=x"], "did you mean 'rl.trainer.dtype'"),
        (["--fault", "noop", "--set", "rl.lr=1", "--set", "rl.lr.x=2"], "lr was given a value of its own"),
        (["--fault", "noop", "--set", "rl..lr=2"], "not of the form group.key=value"),
        (["--fault", "deepspeed_clipping_default", "--onset", "5"], "it has no other onset or schedule"),
        (["--fault", "deepspeed_clipping_default", "--set", "schedule.every=2"], "it has no other onset or schedule"),
        (["--fault", "noop", "--json="], "--json= needs the name of a file"),
        (["--fault", "noop", "--json=/"], "--json=/ is a folder"),
        (["--fault", "noop", "--out", "/dev/null/x"], "/dev/null/x cannot be made: /dev/null is not a folder"),
        (["--fault", "deepspeed_clipping_default", "--engine", "torch"], "needs the deepspeed engine"),
    ],
)
def test_usage_errors_are_one_sentence_and_exit_2(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path))
    code, out, err = run(["run", "--out", str(tmp_path / "out"), *argv], capsys)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("harness: error: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_unknown_option_and_missing_fault_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--falt", "noop"], capsys)[0] == 2
    assert run(["run"], capsys)[0] == 2
    assert run(["run", "--fault", "noop", "--mode", "live"], capsys)[0] == 2


def test_settings_reach_the_request() -> None:
    settings = ["fault.severity=8", "rl.lr=1e-3", "rl.beta=0", "schedule.until=12", "schedule.every=2"]
    request = build_request("grad_overflow", "tiny-qwen3-moe", 2, 5, 30, 9, settings, "free", None)
    assert dict(request.fault.options) == {"multiplier": 8.0}
    assert (request.fault.schedule.onset, request.fault.schedule.until, request.fault.schedule.every) == (9, 12, 2)
    assert (request.pair.rl.lr, request.pair.rl.beta, request.pair.steps, request.pair.onset) == (1e-3, 0.0, 30, 9)
    assert (request.seeds, request.mode, request.engine) == ((5, 6), "free", "torch")
    never = build_request("noop", "tiny-qwen3-moe", None, 0, None, 99, [], None, None)
    assert never.fault.schedule.onset == 99
    assert build_request(
        "deepspeed_clipping_default", "tiny-qwen3-moe", None, 0, None, None, [], None, None
    ).engine == ("deepspeed")
    config = build_request("deepspeed_clipping_default", "tiny-qwen3-moe", None, 0, 4, 0, [], None, None)
    assert (config.fault.schedule.onset, config.pair.steps) == (0, 4)
    nested = build_request(
        "noop", "tiny-qwen3-moe", None, 0, None, None, ["rl.trainer.dtype=bfloat16", "schedule.onset=3"], None, None
    )
    usual = load_pair("tiny-qwen3-moe").rl
    assert nested.pair.rl.trainer == usual.trainer.model_copy(update={"dtype": "bfloat16"})
    assert nested.pair.rl.rollout == usual.rollout
    assert (nested.fault.schedule.onset, nested.pair.onset) == (3, 3)


def test_interrupt_crash_and_debug(
    fake: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> Any:
        raise KeyboardInterrupt

    def break_() -> Any:
        raise ZeroDivisionError("nothing to divide by")

    argv = ["run", "--fault", "noop", "--out", str(tmp_path / "out")]
    fake["make"] = interrupt
    code, _, err = run(argv, capsys)
    assert code == 130
    assert "Traceback" not in err
    fake["make"] = break_
    code, _, err = run(argv, capsys)
    assert code == 3
    assert "ZeroDivisionError at test_run.py:" in err
    assert "Traceback" not in err
    code, _, err = run([*argv, "--debug"], capsys)
    assert code == 3
    assert "Traceback" in err


def test_tracking_that_fails_costs_a_warning_and_not_the_result(
    fake: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise MachineError("MLflow at http://x could not be written")

    monkeypatch.setattr(tracking, "log_experiment", refuse)
    code, out, err = run(["run", "--fault", "grad_overflow", "--out", str(tmp_path / "out")], capsys)
    assert code == 0
    assert "harness: warning: MLflow at http://x could not be written" in err
    assert "REPRODUCED" in out
    assert json.loads((tmp_path / "out" / "fidelity.json").read_text())["mlflow"] is None


def test_a_fault_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from harness import catalogue

    broken = EntryPoint("broken", "no_such_package", catalogue.GROUP)
    monkeypatch.setattr(catalogue.importlib.metadata, "entry_points", lambda group: [broken])
    catalogue._discover.cache_clear()
    try:
        with pytest.raises(UsageError, match=r"fault package 'no_such_package' \(broken\) cannot be imported"):
            catalogue.catalogue()
    finally:
        monkeypatch.undo()
        catalogue._discover.cache_clear()
