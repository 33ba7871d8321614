"""The report of an experiment: one HTML page that needs no network. The only file that imports plotly."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.catalogue import find
from harness.seams import describe_seam

if TYPE_CHECKING:
    from harness.experiment import Experiment
    from harness.tracking import TrackingRef

COLOURS = {"clean": "#4c78a8", "faulted": "#d62728", "null": "#9aa0a6"}
UNITS = {
    "loss": "loss",
    "entropy": "nats",
    "kl": "nats",
    "logprob_gap": "nats",
    "logprob_gap_max": "nats",
    "router_entropy": "nats",
    "reward": "reward",
    "response_length": "tokens",
    "clip_fraction": "share of tokens",
    "topk_mass": "probability",
    "skipped_steps": "updates per step",
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1f23; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.verdict { display: inline-block; padding: .15rem .7rem; border-radius: .3rem; color: #fff; font-weight: 600; }
.good { background: #2e7d32; } .bad { background: #b3261e; } .open { background: #8a6d00; }
table { border-collapse: collapse; margin: .6rem 0; } td, th { padding: .25rem .8rem; border-bottom: 1px solid #ddd; }
th { text-align: left; font-weight: 600; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
code { background: #f4f5f7; padding: 0 .25rem; border-radius: .2rem; word-break: break-all; }
summary { cursor: pointer; font-weight: 600; margin: 1rem 0; }
"""


def write_report(experiment: Experiment, path: Path, *, tracking: TrackingRef | None = None) -> Path:
    """Write the page, whole or not at all.

    Args:
        experiment: What was found.
        path: File to write.
        tracking: Where it was logged, if it was.

    Returns:
        The path.
    """
    from plotly.offline import get_plotlyjs

    path.parent.mkdir(parents=True, exist_ok=True)
    body = "\n".join(_sections(experiment, tracking))
    title = f"{experiment.request.fault.name} on {experiment.request.pair.name}: {experiment.verdict}"
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_e(title)}</title>'
        f"<style>{STYLE}</style><script>{get_plotlyjs()}</script></head><body>{body}</body></html>"
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)
    return path


def _e(text: object) -> str:
    return html.escape(str(text))


def _sections(experiment: Experiment, tracking: TrackingRef | None) -> Iterable[str]:
    request, fault = experiment.request, find(experiment.request.fault.name)
    colour = {"REPRODUCED": "good", "INCONCLUSIVE": "open", "PARTIAL": "open"}.get(experiment.verdict, "bad")
    yield f"<h1>{_e(fault.name)} on {_e(request.pair.name)}</h1>"
    yield f"<p>{_e(fault.summary)}</p>"
    yield f'<p><span class="verdict {colour}">{_e(experiment.verdict)}</span> {_e(experiment.reason)}</p>'
    if experiment.report is not None:
        yield "<h2>Symptoms and fidelity</h2>" + _symptoms(experiment)
    yield "<h2>Cost</h2>" + _cost(experiment)
    if experiment.sets:
        yield "<h2>Curves</h2>" + _legend(experiment)
        responding, quiet = _metrics(experiment)
        for metric in responding:
            yield _figure(experiment, metric)
        yield f"<details><summary>{len(quiet)} metrics that do not respond</summary>"
        for metric in quiet:
            yield _figure(experiment, metric)
        yield "</details>"
    yield "<h2>What was run</h2>" + _specification(experiment, tracking)


def _legend(experiment: Experiment) -> str:
    onset = experiment.request.fault.schedule.onset
    return (
        "<p>Left the original, right the proxy. Upper row: thin lines are seeds, thick lines their mean; values that "
        "are not finite stand as crosses at the top. Lower row: faulted minus clean, and, in grey, null minus clean, "
        f"which is how far two healthy runs drift apart. The dotted line is the onset, step {onset}.</p>"
    )


def _metrics(experiment: Experiment) -> tuple[list[str], list[str]]:
    """Metrics in the order of the comparison's table: those that respond, and the others."""
    assert experiment.report is not None
    fidelity = experiment.report.fidelity
    present = {m for arms in experiment.sets.values() for t in arms.clean.values() for m in t.metrics}
    order = [m for m in fidelity if m in present] + sorted(present - set(fidelity))
    responding = [m for m in order if fidelity.get(m) is not None]
    return responding, [m for m in order if m not in responding]


def describe_symptom(symptom: Any) -> str:
    """Say in a few words what a metric does, for example ``level shift up at step 8``."""
    if symptom is None:
        return "not observable"
    if symptom.kind == "none":
        return "none"
    kind = {"nonfinite": f"becomes {symptom.which}", "frozen": f"frozen ({symptom.which})"}.get(
        symptom.kind, symptom.kind.replace("_", " ") + {1: " up", -1: " down"}.get(symptom.sign, "")
    )
    return f"{kind} at step {symptom.onset}"


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def _symptoms(experiment: Experiment) -> str:
    report = experiment.report
    assert report is not None
    rows = []
    for metric, score in report.fidelity.items():
        both = [report.symptoms.get(model, {}).get(metric) for model in ("original", "proxy")]
        if score is None and all(s is None or s.kind == "none" for s in both):
            continue
        cells = [metric, *map(describe_symptom, both)]
        numbers = [_number(report.onset_lags.get(metric)), _number(report.size_ratios.get(metric)), _number(score, 2)]
        rows.append(
            "<tr>" + "".join(f"<td>{_e(c)}</td>" for c in cells) + "".join(f'<td class="n">{n}</td>' for n in numbers)
        )
    head = ["metric", "original", "proxy", "onset lag (steps)", "size ratio (proxy / original)", "fidelity"]
    ci = "" if report.ci is None else f" [{report.ci[0]:.2f}, {report.ci[1]:.2f}]"
    overall = "not scored" if report.overall is None else f"{report.overall:.2f}{ci}"
    trip = ""
    if experiment.severity_to_trip is not None:
        said = ", ".join(f"{m} {_number(v)}" for m, v in experiment.severity_to_trip.items())
        trip = f"<p>Smallest severity tried that trips: {_e(said)}.</p>"
    table = "<table><tr>" + "".join(f"<th>{h}</th>" for h in head) + "</tr>" + "\n".join(rows) + "</table>"
    return f"<p>Overall fidelity {overall}.</p>{table}{trip}"


def _cost(experiment: Experiment) -> str:
    names = {"seconds_per_step": "seconds per step", "peak_rss_mb": "peak memory (MiB)", "parameters": "parameters"}
    rows = "".join(
        f"<tr><td>{title}</td>"
        + "".join(f'<td class="n">{_number(experiment.cost.get(k, {}).get(name), 4)}</td>' for k in _COLUMNS)
        + "</tr>"
        for name, title in names.items()
    )
    return f"<table><tr><th></th><th>original</th><th>proxy</th><th>ratio</th></tr>{rows}</table>"


_COLUMNS = ("original", "proxy", "ratio")


def _figure(experiment: Experiment, metric: str) -> str:
    from plotly.subplots import make_subplots

    onset = experiment.request.fault.schedule.onset
    figure = make_subplots(
        rows=2,
        cols=2,
        shared_xaxes=True,
        vertical_spacing=0.08,
        row_heights=[0.62, 0.38],
        column_titles=["original", "proxy"],
    )
    for column, (_, arms) in enumerate(experiment.sets.items(), start=1):
        for condition in ("clean", "faulted"):
            _curves(figure, column, getattr(arms, condition), metric, condition)
        for condition in ("null", "faulted"):
            _responses(figure, column, arms.clean, getattr(arms, condition), metric, condition)
        for row in (1, 2):
            figure.add_vline(x=onset - 0.5, line={"dash": "dot", "color": "#555", "width": 1}, row=row, col=column)
    figure.update_layout(
        title={"text": metric, "x": 0.01},
        template="plotly_white",
        height=430,
        margin={"l": 70, "r": 20, "t": 60, "b": 40},
        legend={"orientation": "h", "y": 1.16, "x": 1, "xanchor": "right"},
    )
    figure.update_yaxes(title_text=UNITS.get(metric, metric.partition("/")[0].replace("_", " ")), row=1, col=1)
    figure.update_yaxes(title_text="response", row=2, col=1)
    figure.update_xaxes(title_text="step", row=2)
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False}))


def _curves(figure: Any, column: int, traces: Any, metric: str, condition: str) -> None:
    import plotly.graph_objects as go

    columns = {seed: trace.column(metric) for seed, trace in traces.items()}
    steps = next(iter(traces.values())).steps
    for seed, values in columns.items():
        line = {"color": COLOURS[condition], "width": 1}
        figure.add_trace(
            go.Scatter(
                x=steps, y=_finite(values), line=line, opacity=0.4, showlegend=False, name=f"{condition} {seed}"
            ),
            row=1,
            col=column,
        )
    line = {"color": COLOURS[condition], "width": 2.5}
    shown = {"name": condition, "legendgroup": condition, "showlegend": column == 1}
    figure.add_trace(go.Scatter(x=steps, y=_mean(columns.values()), line=line, **shown), row=1, col=column)
    marks = [(s, _word(v)) for values in columns.values() for s, v in zip(steps, values, strict=True) if _word(v)]
    if marks:
        top = max((v for values in columns.values() for v in _finite(values) if v is not None), default=1.0)
        marker = {"symbol": "x", "color": COLOURS[condition], "size": 7}
        word = marks[0][1]
        figure.add_trace(
            go.Scatter(
                x=[s for s, _ in marks],
                y=[top * 1.1] * len(marks),
                mode="markers",
                marker=marker,
                text=[w for _, w in marks],
                name=f"{condition}: {word}",
                showlegend=column == 1,
            ),
            row=1,
            col=column,
        )


def _responses(figure: Any, column: int, clean: Any, other: Any, metric: str, condition: str) -> None:
    import plotly.graph_objects as go

    steps = next(iter(clean.values())).steps
    for seed in clean:
        pairs = zip(other[seed].column(metric), clean[seed].column(metric), strict=True)
        response = [None if a is None or b is None else a - b for a, b in pairs]
        line = {"color": COLOURS[condition], "width": 1.2}
        first = seed == next(iter(clean)) and column == 1 and condition == "null"
        figure.add_trace(
            go.Scatter(
                x=steps, y=_finite(response), line=line, opacity=0.7, name=f"{condition} - clean", showlegend=first
            ),
            row=2,
            col=column,
        )


def _finite(values: Iterable[float | None]) -> list[float | None]:
    return [v if v is not None and math.isfinite(v) else None for v in values]


def _word(value: float | None) -> str | None:
    if value is None or math.isfinite(value):
        return None
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _mean(columns: Iterable[list[float | None]]) -> list[float | None]:
    means: list[float | None] = []
    for values in zip(*columns, strict=True):
        known = [v for v in values if v is not None and math.isfinite(v)]
        means.append(sum(known) / len(known) if len(known) == len(values) else None)
    return means


def _specification(experiment: Experiment, tracking: TrackingRef | None) -> str:
    request, fault = experiment.request, find(experiment.request.fault.name)
    rows = {
        "fault": f"{fault.name} at {describe_seam(fault.seam)}",
        "options": ", ".join(f"{k} = {v}" for k, v in request.fault.options) or "none",
        "schedule": request.fault.schedule,
        "seen in": ", ".join(fault.seen_in),
        "mode": request.mode,
        "engine": request.engine,
        "seeds": ", ".join(map(str, request.seeds)),
        "ability (exact match)": ", ".join(f"{k} {v:.1%}" for k, v in experiment.ability.items()),
        "pair": request.pair.model_dump_json(),
        "versions": ", ".join(f"{k} {v}" for k, v in experiment.versions.items()),
    }
    if tracking is not None:
        rows["MLflow"] = f"{tracking.tracking_uri}, experiment {tracking.experiment}, run {tracking.run_id}"
    table = "".join(f"<tr><th>{_e(k)}</th><td><code>{_e(v)}</code></td></tr>" for k, v in rows.items())
    traces = "".join(
        f"<tr><td>{_e(arm.label)}</td><td><code>{_e(run.trace_path)}</code></td><td><code>{run.digest[:12]}</code></td></tr>"
        for arm, run in experiment.runs
    )
    return f"<table>{table}</table><details><summary>Traces</summary><table>{traces}</table></details>"
