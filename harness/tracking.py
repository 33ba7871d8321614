"""MLflow: a parent run per experiment, a child per arm, one writer. The only file that imports mlflow."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import MachineError
from harness.trace import StepRecord, Trace

BATCH = 1000  # most metrics that one log_batch call may carry
MAX_PARAM = 6000  # longest parameter value


@dataclass(frozen=True)
class TrackedArm:
    """One arm as it is to be shown.

    Attributes:
        label: For example ``original/clean seed 0``.
        tags: Fault, pair, arm, seed and so on.
        trace: Its trace.
        trace_path: Its trace as a file; logged as an artifact, since MLflow cannot hold infinities.
        metrics: Numbers about the whole arm, such as seconds per step.
    """

    label: str
    tags: Mapping[str, str]
    trace: Trace
    trace_path: Path
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class TrackingRef:
    """Where an experiment was logged."""

    tracking_uri: str
    experiment: str
    run_id: str


def tracking_uri(home: Path) -> str:
    """Return MLFLOW_TRACKING_URI, or the SQLite database under ``home``."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home / 'mlflow.db'}"


def _client(home: Path) -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # its own default makes a dead server cost minutes
    from mlflow import MlflowClient

    for name in ("mlflow", "mlflow.store.db.utils", "alembic"):  # importing mlflow sets them to INFO
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient(tracking_uri(home))


def log_experiment(
    home: Path,
    *,
    experiment: str,
    name: str,
    tags: Mapping[str, str],
    params: Mapping[str, Any],
    metrics: Mapping[str, float | None],
    arms: Sequence[TrackedArm],
    artifacts: Sequence[Path],
    note: str,
) -> TrackingRef:
    """Log an experiment and its arms.

    Args:
        home: Where the default database lies.
        experiment: MLflow experiment; made if it is not there.
        name: Name of the parent run.
        tags: Tags of the parent run.
        params: Parameters of the parent run.
        metrics: Numbers of the parent run; missing and non-finite ones are left out.
        arms: One child run each.
        artifacts: Files of the parent run.
        note: Markdown shown at the top of the parent run.

    Raises:
        MachineError: If the tracking server or database cannot be reached.
    """
    uri = tracking_uri(home)
    try:
        client = _client(home)
        number = _experiment(client, experiment, home)
        parent = client.create_run(number, run_name=name, tags={**tags, "mlflow.note.content": note})
        run_id = str(parent.info.run_id)
        _log(client, run_id, list(_finite(metrics)), params)
        for path in artifacts:
            client.log_artifact(run_id, str(path))
        for arm in arms:
            child = client.create_run(
                number, run_name=arm.label, tags={**tags, **arm.tags, "mlflow.parentRunId": run_id}
            )
            _log(client, child.info.run_id, [*step_metrics(arm.trace), *_finite(arm.metrics)], {})
            client.log_artifact(child.info.run_id, str(arm.trace_path))
            client.set_terminated(child.info.run_id)
        client.set_terminated(run_id)
    except Exception as e:  # the client raises whatever its transport raises
        raise MachineError(f"MLflow at {uri} could not be written: {type(e).__name__}: {e}") from e
    return TrackingRef(uri, experiment, run_id)


def _experiment(client: Any, name: str, home: Path) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    local = "MLFLOW_TRACKING_URI" not in os.environ
    location = (home / "mlartifacts").as_uri() if local else None
    tags = {"mlflow.experimentKind": "custom_model_development"}  # the page opens on runs and curves, not on agents
    return str(client.create_experiment(name, artifact_location=location, tags=tags))


def _finite(metrics: Mapping[str, float | None]) -> Iterator[tuple[str, float, int]]:
    for name, value in metrics.items():
        if value is not None and math.isfinite(value):
            yield name, float(value), 0


def step_metrics(trace: Trace) -> Iterator[tuple[str, float, int]]:
    """Yield ``(name, value, step)`` of what MLflow can hold of a trace.

    A non-finite value is left out (MLflow would store infinity as 1.8e308); a metric that has any gets a companion
    ``<name>_nonfinite`` that is 1 at those steps and 0 at the others. Missing values stay missing.
    """
    for name in trace.metrics:
        column = trace.column(name)
        sick = any(v is not None and not math.isfinite(v) for v in column)
        for step, value in zip(trace.steps, column, strict=True):
            if value is None:
                continue
            if math.isfinite(value):
                yield name, value, step
            if sick:
                yield f"{name}_nonfinite", float(not math.isfinite(value)), step


def _log(client: Any, run_id: str, metrics: list[tuple[str, float, int]], params: Mapping[str, Any]) -> None:
    from mlflow.entities import Metric, Param

    now = int(time.time() * 1000)
    entities = [Metric(name, value, now, step) for name, value, step in metrics]
    for start in range(0, len(entities), BATCH):
        client.log_batch(run_id, metrics=entities[start : start + BATCH])
    pairs = [Param(name, str(value)[:MAX_PARAM]) for name, value in params.items()]
    for start in range(0, len(pairs), 100):
        client.log_batch(run_id, params=pairs[start : start + 100])


def read_run(uri: str, run_id: str) -> Trace:
    """Read the step metrics of a run back as a trace; ``*_nonfinite`` companions are not undone.

    Raises:
        MachineError: If there is no such run or server.
    """
    try:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        client = MlflowClient(uri)
        steps: dict[int, dict[str, float]] = {}
        for name in client.get_run(run_id).data.metrics:
            for point in client.get_metric_history(run_id, name):
                steps.setdefault(point.step, {})[name] = point.value
    except Exception as e:
        raise MachineError(f"run {run_id} cannot be read from MLflow at {uri}: {type(e).__name__}: {e}") from e
    return Trace([StepRecord(step, metrics) for step, metrics in sorted(steps.items())])


def serve(home: Path, port: int) -> int:
    """Run MLflow's server on loopback until it is interrupted; returns its exit status."""
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", tracking_uri(home), "--default-artifact-root", (home / "mlartifacts").as_uri()]
    process = subprocess.Popen(command, env=environment)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        return 0
