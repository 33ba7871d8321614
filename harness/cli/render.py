"""An experiment as JSON and as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.report import describe_symptom
from harness.trace import to_json_value

if TYPE_CHECKING:
    from harness.experiment import Experiment
    from harness.tracking import TrackingRef

SCHEMA = "harness/fidelity@1"
ALWAYS = ("loss", "grad_norm", "entropy", "reward", "kl", "logprob_gap", "response_length", "clip_fraction")


def to_json(experiment: Experiment, report: Path, tracking: TrackingRef | None) -> dict[str, Any]:
    """Return an experiment as JSON data; non-finite numbers are the strings "nan", "inf", "-inf"."""
    request = experiment.request
    found: dict[str, Any] = {} if experiment.report is None else experiment.report.to_json()
    trips = experiment.severity_to_trip
    return {
        "schema": SCHEMA,
        "fault": request.fault.name,
        "pair": request.pair.name,
        **found,
        "mode": request.mode,
        "engine": request.engine,
        "verdict": experiment.verdict,
        "reason": experiment.reason,
        "severity_to_trip": None if trips is None else {k: to_json_value(v) for k, v in trips.items()},
        "spec": {
            "pair": request.pair.model_dump(mode="json"),
            "fault": request.fault.to_dict(),
            "seeds": request.seeds,
        },
        "ability": experiment.ability,
        "cost": experiment.cost,
        "runs": [
            {
                "arm": f"{arm.model}/{arm.condition}",
                "seed": arm.seed,
                "trace": str(run.trace_path),
                "digest": run.digest,
            }
            for arm, run in experiment.runs
        ],
        "failures": [{"arm": f.label, "kind": f.kind, "error": f.error} for f in experiment.failures],
        "mlflow": None
        if tracking is None
        else {
            "tracking_uri": tracking.tracking_uri,
            "experiment": tracking.experiment,
            "run_id": tracking.run_id,
        },
        "report": str(report),
        "versions": experiment.versions,
    }


def numbers(experiment: Experiment) -> dict[str, float | None]:
    """Return what MLflow is to show of an experiment as numbers."""
    cost = {
        f"cost/{model}/{name}": value for model, values in experiment.cost.items() for name, value in values.items()
    }
    report = experiment.report
    if report is None:
        return dict(cost)
    low, high = report.ci or (None, None)
    scores = {"fidelity/overall": report.overall, "fidelity/low": low, "fidelity/high": high}
    return {**cost, **scores, **{f"fidelity/{m}": v for m, v in report.fidelity.items()}}


def show(experiment: Experiment, report: Path, tracking: TrackingRef | None) -> None:
    """Print the table, the cost, the verdict and where the rest is."""
    from rich.console import Console

    console = Console(highlight=False)
    if experiment.report is not None:
        console.print(_symptoms(experiment))
    if experiment.cost:
        console.print(_cost(experiment))
    if experiment.severity_to_trip is not None:
        said = ", ".join(
            f"{model} {value:g}" for model, value in experiment.severity_to_trip.items() if value is not None
        )
        console.print(f"severity to trip: {said}")
    if experiment.report is not None and experiment.report.overall is not None:
        low, high = experiment.report.ci or (float("nan"), float("nan"))
        console.print(f"fidelity: {experiment.report.overall:.2f} [{low:.2f}, {high:.2f}]", markup=False)
    console.print(f"\n{experiment.verdict}: {experiment.reason}", markup=False)
    print_path(console, "report", str(report))
    if tracking is not None:
        print_path(console, "MLflow", f"{tracking.tracking_uri} run {tracking.run_id}")


def print_path(console: Any, what: str, path: str) -> None:
    """Print a path on a line of its own, never wrapped."""
    console.print(f"{what}: {path}", soft_wrap=True, markup=False)


def _symptoms(experiment: Experiment) -> Any:
    from rich.table import Table

    report = experiment.report
    assert report is not None
    table = Table(title=f"{experiment.request.fault.name} on {experiment.request.pair.name}", title_justify="left")
    for name in ("metric", "original", "proxy"):
        table.add_column(name, overflow="fold")
    for name in ("lag", "size", "fidelity"):
        table.add_column(name, justify="right")
    rest = [m for m, score in report.fidelity.items() if score is not None and m not in ALWAYS]
    for metric in (*ALWAYS, *rest):
        both = [report.symptoms.get(model, {}).get(metric) for model in ("original", "proxy")]
        lag, size, score = report.onset_lags.get(metric), report.size_ratios.get(metric), report.fidelity.get(metric)
        table.add_row(
            metric,
            *map(describe_symptom, both),
            "" if lag is None else f"{lag:+d}",
            "" if size is None else f"{size:.2g}",
            "" if score is None else f"{score:.2f}",
        )
    return table


def _cost(experiment: Experiment) -> Any:
    from rich.table import Table

    table = Table(title="cost", title_justify="left")
    table.add_column("")
    for name in ("original", "proxy", "ratio"):
        table.add_column(name, justify="right")
    rows = {
        "seconds per step": ("seconds_per_step", "{:.3f}"),
        "peak memory (MiB)": ("peak_rss_mb", "{:.0f}"),
        "parameters": ("parameters", "{:,.0f}"),
    }
    for title, (key, form) in rows.items():
        values = [experiment.cost.get(model, {}).get(key) for model in ("original", "proxy")]
        ratio = experiment.cost.get("ratio", {}).get(key)
        cells = ["" if v is None else form.format(v) for v in values]
        table.add_row(title, *cells, "" if ratio is None else f"{ratio:.2f}")
    return table
