from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from harness.errors import MachineError
from harness.trace import StepRecord, Trace, write_parquet
from harness.tracking import TrackedArm, TrackingRef, log_experiment, read_run, step_metrics

SICK = Trace(
    [
        StepRecord(0, {"loss": 1.0, "grad_norm": 2.0}),
        StepRecord(1, {"loss": -0.0, "grad_norm": math.inf}),
        StepRecord(2, {"grad_norm": math.nan}),
    ]
)


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose database has been through MLflow's migrations, to copy: they take seconds."""
    home = tmp_path_factory.mktemp("mlflow")
    log(home, [])
    return home


def log(home: Path, arms: list[TrackedArm], artifacts: list[Path] | None = None) -> TrackingRef:
    return log_experiment(
        home,
        experiment="harness/test",
        name="grad_overflow replay",
        tags={"fault": "grad_overflow"},
        params={"seeds": (0, 1)},
        metrics={"fidelity/overall": 0.9, "fidelity/loss": None, "fidelity/low": math.nan},
        arms=arms,
        artifacts=artifacts or [],
        note="**REPRODUCED**",
    )


def test_what_mlflow_cannot_hold_is_left_out_and_flagged() -> None:
    assert list(step_metrics(SICK)) == [
        ("grad_norm", 2.0, 0),
        ("grad_norm_nonfinite", 0.0, 0),
        ("grad_norm_nonfinite", 1.0, 1),
        ("grad_norm_nonfinite", 1.0, 2),
        ("loss", 1.0, 0),
        ("loss", -0.0, 1),
    ]


@pytest.mark.filterwarnings("default")  # MLflow's own dependencies deprecate things among themselves
def test_parent_and_child_runs_hold_the_experiment(
    migrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    home = tmp_path / "home"
    shutil.copytree(migrated, home)
    trace = tmp_path / "trace.parquet"
    write_parquet(SICK, trace)
    report = tmp_path / "report.html"
    report.write_text("<html></html>")
    arm = TrackedArm("original/faulted seed 0", {"arm": "original/faulted", "seed": "0"}, SICK, trace, {"cost/s": 0.5})
    ref = log(home, [arm], [report])
    assert ref.tracking_uri == f"sqlite:///{home}/mlflow.db"
    client = MlflowClient(ref.tracking_uri)
    parent = client.get_run(ref.run_id)
    assert parent.data.metrics == {"fidelity/overall": 0.9}
    assert parent.data.tags["mlflow.note.content"] == "**REPRODUCED**"
    assert parent.data.params["seeds"] == "(0, 1)"
    found = client.search_runs([parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{ref.run_id}'")
    assert [r.data.tags["arm"] for r in found] == ["original/faulted"]
    assert found[0].data.metrics["cost/s"] == 0.5
    assert [a.path for a in client.list_artifacts(found[0].info.run_id)] == ["trace.parquet"]
    assert read_run(ref.tracking_uri, found[0].info.run_id).column("loss") == [1.0, 0.0, None]
    assert capfd.readouterr().out == ""


@pytest.mark.filterwarnings("default")
def test_an_unreachable_server_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # the discard port: nobody listens
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(MachineError, match=r"MLflow at http://127.0.0.1:9 could not be written") as e:
        log(tmp_path, [])
    assert e.value.exit_code == 3
