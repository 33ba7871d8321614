"""``harness compare`` and ``harness inspect``: other people's runs, side by side and one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.common import Json, check_file, write_json
from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.fidelity.report import FidelityReport
    from harness.trace import Trace

COMPARED = "harness/compare@1"
INSPECTED = "harness/inspect@1"
EXIT = {"REPRODUCED": 0, "INCONCLUSIVE": 4}  # every other verdict: 1
Form = Annotated[str, typer.Option("--format", help="Format of the logs; `harness import list` shows those known.")]
Map = Annotated[list[str] | None, typer.Option("--map", help="canonical=native, for example loss=actor/pg_loss.")]


def compare(
    original: Annotated[str, typer.Argument(help="Trace, log, mlflow:RUN, or folder of seeds of the original.")],
    proxy: Annotated[str, typer.Argument(help="The same of the proxy, or of any other model.")],
    clean_original: Annotated[str | None, typer.Option("--clean-original", help="Healthy twins.")] = None,
    clean_proxy: Annotated[str | None, typer.Option("--clean-proxy", help="Healthy twins.")] = None,
    null_original: Annotated[
        str | None, typer.Option("--null-original", help="A/A controls, if there are any.")
    ] = None,
    null_proxy: Annotated[str | None, typer.Option("--null-proxy", help="A/A controls, if there are any.")] = None,
    onset: Annotated[
        int | None, typer.Option("--onset", help="Step at which the trouble begins; otherwise the first symptom's.")
    ] = None,
    form: Form = "auto",
    choose: Map = None,
    json: Json = None,
) -> None:
    """Say whether a proxy fails as the original does, from traces or logs of any trainer."""
    check_file(json)
    if (clean_original is None) != (clean_proxy is None):
        raise UsageError("give clean twins of both models, --clean-original and --clean-proxy, or of neither")
    if (null_original is None) != (null_proxy is None) or (null_original is not None and clean_original is None):
        raise UsageError(
            "null arms are given for both models, --null-original and --null-proxy, beside the clean twins"
        )
    from harness.fidelity.signs import first_trouble
    from harness.fidelity.stand_ins import Observed, judge
    from harness.importers.arms import load_runs
    from harness.importers.names import choices

    warnings: list[str] = []

    def load(word: str | None) -> dict[int, Trace]:
        if word is None:
            return {}
        runs, more = load_runs(word, form, choices(choose or []))
        warnings.extend(more)
        return runs

    models = []
    for name, faulted, clean, null in (
        ("original", original, clean_original, null_original),
        ("proxy", proxy, clean_proxy, null_proxy),
    ):
        runs, twins = load(faulted), load(clean)
        if twins and not {*runs} & {*twins}:
            raise UsageError(
                f"{clean}: no seed of {faulted} has a clean twin there (seeds {sorted(twins)}, {sorted(runs)})"
            )
        at = onset if onset is not None else first_trouble(runs.values())
        if at is None:
            raise UsageError(f"{faulted}: no symptom that marks an onset was found; say --onset")
        if onset is None:
            warnings.append(f"the onset of the {name}, step {at}, was taken from its first symptom; --onset says it")
        models.append(Observed(runs, twins, load(null), at))
    report, said = judge(models[0], models[1])
    data = {
        "schema": COMPARED,
        "evidence": "clean twins" if clean_original else "own stretch before the onset",
        "weaker": not (clean_original and null_original),
        "onsets": {"original": models[0].onset, "proxy": models[1].onset},
        "warnings": [*said, *dict.fromkeys(warnings)],
        **report.to_json(),
    }
    if json is not None:
        write_json(data, json)
    if json != "-":
        _show(report, data)
    raise typer.Exit(EXIT.get(report.verdict, 1))


def _show(report: FidelityReport, data: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from harness.report import describe_symptom, format_number

    table = Table(title=f"{report.verdict} ({data['evidence']}; onset at step {report.onset})")
    for column in ("metric", "original", "proxy", "lag", "size", "fidelity"):
        table.add_column(column)
    models = [report.symptoms.get(model, {}) for model in ("original", "proxy")]
    for metric in models[0]:
        cells = [describe_symptom(found[metric]) if metric in found else "not logged" for found in models]
        lag, size = report.onset_lags.get(metric), report.size_ratios.get(metric)
        fidelity = report.fidelity.get(metric)
        table.add_row(
            metric, *cells, "" if lag is None else str(lag), *(format_number(x, "{:.2f}") for x in (size, fidelity))
        )
    if models[0]:
        Console().print(table)
    overall = "" if report.overall is None else f" Fidelity {report.overall:.2f}."
    typer.echo(f"{report.verdict}: {report.reason}{overall}")
    for sentence in data["warnings"]:
        typer.echo(f"note: {sentence}", err=True)


def inspect(
    logs: Annotated[list[str], typer.Argument(help="Logs, traces, or mlflow:RUN.")],
    form: Form = "auto",
    choose: Map = None,
    json: Json = None,
) -> None:
    """Look for symptoms in runs by themselves, and name what looks like one and is none."""
    check_file(json)
    from harness.fidelity.signs import look
    from harness.importers.arms import load_named
    from harness.importers.names import choices

    runs, warnings = load_named(logs, form, choices(choose or []))
    found = {label: look(trace) for label, trace in runs.items()}
    data = {
        "schema": INSPECTED,
        "runs": [
            {
                "label": label,
                "records": len(runs[label]),
                "symptoms": [s.to_json() for s in signs if s.kind == "symptom"],
                "benign": [s.to_json() for s in signs if s.kind == "benign"],
            }
            for label, signs in found.items()
        ],
        "warnings": warnings,
    }
    if json is not None:
        write_json(data, json)
    if json == "-":
        return
    for label, signs in found.items():
        symptoms = sum(s.kind == "symptom" for s in signs)
        typer.echo(f"{label}: {len(runs[label])} records, {symptoms or 'no'} symptom{'' if symptoms == 1 else 's'}")
        for s in signs:
            typer.echo(f"  {s.kind:8s} step {s.step:>6} {s.metric}: {s.name}. {s.sentence}")
    for sentence in warnings:
        typer.echo(f"note: {sentence}", err=True)
