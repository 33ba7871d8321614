"""An experiment as JSON, as a table, and as what MLflow is to show of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from harness.cli.common import plain
from harness.curves import MAIN
from harness.report import cost_rows, describe_symptom, format_number

if TYPE_CHECKING:
    from harness.experiment import Experiment
    from harness.tracking import TrackedArm, TrackingRef

SCHEMA = "harness/fidelity@1"
LEGEND = (
    "Symptom and the step at which it begins; lag: onset in the proxy minus onset in the original, in steps; "
    "size: proxy over original; structural: cannot respond in this mode."
)


def to_json(experiment: Experiment, report: Path, tracking: TrackingRef | None) -> dict[str, Any]:
    """Return an experiment as JSON data; non-finite numbers are the strings "nan", "inf", "-inf"."""
    request = experiment.request
    found: dict[str, Any] = {} if experiment.report is None else experiment.report.to_json()
    data: dict[str, Any] = plain(
        {
            "schema": SCHEMA,
            "fault": request.fault.name,
            "pair": request.pair.name,
            **found,
            "mode": request.mode,
            "engine": request.engine,
            "verdict": experiment.verdict,
            "reason": experiment.reason,
            "severity_to_trip": experiment.severity_to_trip,
            "remedy": _remedy(experiment),
            "looks": [vars(look) for look in experiment.looks],
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
                    "trace": str(run.trace_path.absolute()),
                    "digest": run.digest,
                }
                for arm, run in experiment.runs
            ],
            "failures": [{"arm": f.label, "kind": f.kind, "error": f.error} for f in experiment.failures],
            "mlflow": None if tracking is None else vars(tracking),
            "report": str(report),
            "versions": experiment.versions,
        }
    )
    return data


def _remedy(experiment: Experiment) -> dict[str, Any] | None:
    ref = experiment.request.remedy
    if ref is None:
        return None
    found = {} if experiment.restoration is None else experiment.restoration.to_json()
    return {"name": ref.name, "options": dict(ref.options), **found}


def tags(experiment: Experiment) -> dict[str, str]:
    """Return the tags of an experiment's MLflow runs."""
    request = experiment.request
    return {
        "fault": request.fault.name,
        "pair": request.pair.name,
        "mode": request.mode,
        "engine": request.engine,
        "verdict": experiment.verdict,
        **({} if request.remedy is None else {"remedy": request.remedy.name}),
        **{f"version.{name}": value for name, value in experiment.versions.items()},
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


def arms(experiment: Experiment) -> list[TrackedArm]:
    """Return the arms of an experiment as MLflow is to show them."""
    from harness.tracking import TrackedArm

    return [
        TrackedArm(
            label=arm.label,
            tags={"arm": f"{arm.model}/{arm.condition}", "seed": str(arm.seed)},
            trace=stored.trace(),
            trace_path=stored.trace_path,
            metrics={f"cost/{k}": float(v) for k, v in stored.sidecar.items() if isinstance(v, (int, float))},
        )
        for arm, stored in experiment.runs
    ]


def show(experiment: Experiment, report: Path, tracking: TrackingRef | None) -> None:
    """Print the table, the cost, the verdict and where the rest is."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if experiment.report is not None and experiment.report.symptoms:
        console.print(_symptoms(experiment))
        console.print(LEGEND + "\n", style="dim")
    if experiment.cost:
        console.print(_cost(experiment))
    if experiment.severity_to_trip is not None:
        tripped = experiment.severity_to_trip.items()
        said = ", ".join(f"{model} {format_number(value, '{:g}') or 'none tried'}" for model, value in tripped)
        console.print(f"severity to trip: {said}")
    if experiment.report is not None and experiment.report.overall is not None:
        ci = experiment.report.ci
        console.print(f"fidelity: {experiment.report.overall:.2f}" + (f" [{ci[0]:.2f}, {ci[1]:.2f}]" if ci else ""))
    if experiment.looks:
        ways = ", ".join(f"{look.seeds} seeds {look.verdict}" for look in experiment.looks)
        console.print(f"looks (95% over all that were allowed): {ways}")
    console.print(f"\n{experiment.verdict}: {experiment.reason}")
    if experiment.restoration is not None:
        console.print(f"remedy: {experiment.restoration.reason}")
    _path(console, "report", str(report))
    if tracking is not None:
        _path(console, "MLflow", f"{tracking.tracking_uri} run {tracking.run_id}")


def show_failures(experiment: Experiment, *, debug: bool) -> None:
    """Say on standard error which arms failed, with the workers' tracebacks if ``debug``."""
    for failure in experiment.failures:
        typer.echo(f"harness: {failure.label}: {failure.error} ({failure.kind})", err=True)
        if debug and failure.detail:
            typer.echo(failure.detail, err=True)


def _path(console: Any, what: str, path: str) -> None:
    console.print(f"{what}: {path}", soft_wrap=True)


def _table(title: str) -> Any:
    from rich.table import Table
    from rich.text import Text

    # No lines between the columns: at 80 characters a symptom needs every one of them.
    return Table(
        title=Text(title), title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), pad_edge=False
    )


def _symptoms(experiment: Experiment) -> Any:
    from rich.text import Text

    from harness.fidelity.metrics import METRICS

    report, request = experiment.report, experiment.request
    assert report is not None
    table = _table(f"{request.fault.name} on {request.pair.name} ({request.mode})")
    table.add_column("metric", no_wrap=True)
    for name in ("original", "proxy"):
        table.add_column(name)
    for name in ("lag", "size", "fidelity"):
        table.add_column(name, justify="right", no_wrap=True)
    rest = [m for m, score in report.fidelity.items() if score is not None and m not in MAIN]
    for metric in (*MAIN, *rest):
        both = [report.symptoms.get(model, {}).get(metric) for model in ("original", "proxy")]
        structural = metric in METRICS and not METRICS[metric].observable(request.mode)
        table.add_row(
            Text(metric),
            *(Text("structural" if structural else describe_symptom(s).replace(" at step", ",")) for s in both),
            format_number(report.onset_lags.get(metric), "{:+d}"),
            format_number(report.size_ratios.get(metric), "{:.2g}"),
            format_number(report.fidelity.get(metric), "{:.2f}"),
        )
    return table


def _cost(experiment: Experiment) -> Any:
    table = _table("cost")
    table.add_column("")
    for name in ("original", "proxy", "ratio"):
        table.add_column(name, justify="right")
    for row in cost_rows(experiment):
        table.add_row(*row)
    return table
