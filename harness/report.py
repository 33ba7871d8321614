"""The report of an experiment: one HTML page that needs no network. The only file that imports plotly."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.catalogue import find
from harness.seams import describe_seam

if TYPE_CHECKING:
    from typing import TypeGuard

    from harness.experiment import Experiment
    from harness.fidelity.evidence import Evidence
    from harness.trace import Trace
    from harness.tracking import TrackingRef

MAIN = ("loss", "grad_norm", "entropy", "reward", "kl", "logprob_gap", "response_length", "clip_fraction")
MODELS = ("original", "proxy")
COLOURS = {"clean": "#3b6ea5", "faulted": "#c8322b", "null": "#9aa0a6"}
_BY_UNIT = {
    "nats": "entropy kl logprob_gap logprob_gap_max router_entropy",
    "L2 norm": "grad_norm update_norm",
    "tokens": "response_length tokens",
    "ratio": "ratio_mean ratio_max",
    "share of tokens": "clip_fraction",
    "probability": "topk_mass",
    "mean reward": "reward",
    "updates per step": "skipped_steps",
}
UNITS = {metric: unit for unit, metrics in _BY_UNIT.items() for metric in metrics.split()}
COST = (
    ("seconds per step", "seconds_per_step", "{:.3f}"),
    ("peak memory (MiB)", "peak_rss_mb", "{:,.0f}"),
    ("parameters", "parameters", "{:,.0f}"),
)
WIDE = 1e3  # a metric of positive values whose largest and smallest differ by more is drawn on a log axis
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1f23; background: #fff; max-width: 1180px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.4rem; }
h3 { font-size: 1.05rem; margin: 1.6rem 0 0; }
.verdict { display: inline-block; padding: .1rem .7rem; border-radius: .3rem; color: #fff; font-weight: 600; }
.good { background: #2e7d32; } .bad { background: #b3261e; } .open { background: #8a6d00; }
table { border-collapse: collapse; margin: .6rem 0; }
td, th { padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
th { font-weight: 600; } td.n, th.n { text-align: right; padding-left: .8rem; font-variant-numeric: tabular-nums; }
code, pre { background: #f4f5f7; padding: 0 .25rem; border-radius: .2rem; overflow-wrap: anywhere; font-size: .9em; }
pre { padding: .5rem; white-space: pre-wrap; } summary { cursor: pointer; font-weight: 600; margin: 1rem 0; }
"""
# A figure inside a closed <details> has no width until it is opened.
SCRIPT = """
document.querySelectorAll("details").forEach(d => d.addEventListener("toggle", () =>
  d.querySelectorAll(".plotly-graph-div").forEach(g => Plotly.Plots.resize(g))));
"""


def write_report(experiment: Experiment, path: Path, *, tracking: TrackingRef | None = None) -> Path:
    """Write the page, whole or not at all. The same experiment gives the same bytes.

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
        f"<style>{STYLE}</style><script>{get_plotlyjs()}</script></head><body>{body}<script>{SCRIPT}</script></body></html>"
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def describe_symptom(symptom: Any) -> str:
    """Say in a few words what a metric does, for example ``level shift up at step 8``."""
    if symptom is None:
        return "not measured"
    if symptom.kind == "none":
        return "none"
    kind = {"nonfinite": f"becomes {symptom.which}", "frozen": f"frozen ({symptom.which})"}.get(
        symptom.kind, symptom.kind.replace("_", " ") + {1: " up", -1: " down"}.get(symptom.sign, "")
    )
    return f"{kind} at step {symptom.onset}"


def format_number(value: float | None, form: str) -> str:
    """Format a number that may be missing."""
    return "" if value is None else form.format(value)


def _e(text: object) -> str:
    return html.escape(str(text))


def _table(head: tuple[str, ...], rows: Iterable[Iterable[str]], numeric: int = 0) -> str:
    """Return a table of finished cells (HTML), the last ``numeric`` columns aligned as numbers."""

    def row(tag: str, cells: list[str]) -> str:
        marks = [' class="n"' if i >= len(cells) - numeric else "" for i in range(len(cells))]
        return "<tr>" + "".join(f"<{tag}{m}>{c}</{tag}>" for m, c in zip(marks, cells, strict=True)) + "</tr>"

    titles = [row("th", list(head))] if head else []
    return "<table>" + "\n".join([*titles, *(row("td", list(cells)) for cells in rows)]) + "</table>"


def _sections(experiment: Experiment, tracking: TrackingRef | None) -> Iterator[str]:
    request, fault = experiment.request, find(experiment.request.fault.name)
    colour = {"REPRODUCED": "good", "INCONCLUSIVE": "open", "PARTIAL": "open"}.get(experiment.verdict, "bad")
    yield f"<h1>{_e(fault.name)} on {_e(request.pair.name)}</h1>"
    yield f"<p>{_e(fault.summary)}</p>"
    yield f'<p><span class="verdict {colour}">{_e(experiment.verdict)}</span> {_e(experiment.conclusion)}</p>'
    if experiment.failures:
        rows = ([_e(f.label), _e(f.kind), _e(f.error)] for f in experiment.failures)
        yield "<h2>Arms that failed</h2>" + _table(("arm", "kind", "what happened"), rows)
    if experiment.report is not None and experiment.report.symptoms:
        yield "<h2>Symptoms and fidelity</h2>" + _symptoms(experiment)
    if experiment.cost:
        yield "<h2>Cost</h2>" + _table(("", *MODELS, "ratio"), cost_rows(experiment), numeric=3)
    if experiment.sets:
        yield from _curves(experiment)
    yield "<h2>What was run</h2>" + _specification(experiment, tracking)


def _symptoms(experiment: Experiment) -> str:
    report = experiment.report
    assert report is not None
    rows = []
    for metric in _ordered({m for found in report.symptoms.values() for m in found}):
        both = [report.symptoms[model].get(metric) for model in MODELS]
        if report.fidelity.get(metric) is None and all(s is None or s.kind == "none" for s in both):
            continue
        numbers = [
            format_number(report.onset_lags.get(metric), "{:+d}"),
            format_number(report.size_ratios.get(metric), "{:.2f}"),
            format_number(report.fidelity.get(metric), "{:.2f}"),
        ]
        rows.append([f"<code>{_e(metric)}</code>", *(_e(describe_symptom(s)) for s in both), *numbers])
    ci = "" if report.ci is None else f" [{report.ci[0]:.2f}, {report.ci[1]:.2f}]"
    parts = [f"<p>Overall fidelity: {'not scored' if report.overall is None else f'{report.overall:.2f}{ci}'}.</p>"]
    head = ("metric", "original", "proxy", "onset lag (steps)", "size ratio", "fidelity")
    parts.append(_table(head, rows, numeric=3))
    parts.append("<p>Lag: onset in the proxy minus onset in the original. Size ratio: proxy over original.</p>")
    if experiment.severity_to_trip is not None:
        tripped = experiment.severity_to_trip.items()
        said = ", ".join(f"{m} {format_number(v, '{:.4g}') or 'none'}" for m, v in tripped)
        parts.append(f"<p>Smallest severity tried that trips: {_e(said)}.</p>")
    if report.claims:
        word = {True: "yes", False: "no", None: "not observable"}
        claims = ([_e(c["claim"]), *(word[c[model]] for model in MODELS)] for c in report.claims)
        parts.append("<h3>What the fault is expected to do</h3>" + _table(("claim", *MODELS), claims))
    return "".join(parts)


def cost_rows(experiment: Experiment) -> list[list[str]]:
    """Return the cost as text: name, original, proxy, ratio."""
    rows = []
    for title, key, form in COST:
        original, proxy, ratio = (experiment.cost.get(c, {}).get(key) for c in (*MODELS, "ratio"))
        rows.append([title, format_number(original, form), format_number(proxy, form), format_number(ratio, "{:.2f}")])
    return rows


def _ordered(metrics: set[str]) -> list[str]:
    """Put metrics in the order of the comparison's table; those that are not in it come last."""
    from harness.fidelity.metrics import METRICS

    known = [m for m in (*MAIN, *METRICS) if m in metrics]
    return list(dict.fromkeys([*known, *sorted(metrics)]))


def _curves(experiment: Experiment) -> Iterator[str]:
    report = experiment.report
    assert report is not None
    onset = experiment.request.fault.schedule.onset
    yield (
        "<h2>Curves</h2><p>Left the original, right the proxy. Upper row: thin lines are seeds, thick ones their "
        "mean; values that are not finite stand as crosses at the top, with the word. Lower row: the response, faulted "
        "minus clean, by seed, and as a grey band the null spread, which is how far two healthy runs drift apart. "
        "A response is a log ratio, or a difference in clean step-to-step spreads (asinh, so that large ones fit); for "
        f"metrics that are not compared it is the plain difference. The dotted line is the onset, step {onset}.</p>"
    )
    metrics = _ordered({m for arms in experiment.sets.values() for _, _, t in arms.arms() for m in t.metrics})
    quiet = [m for m in metrics if report.fidelity.get(m) is None]
    evidence = _evidence(experiment)
    figures = {m: _figure(experiment, m, f"figure-{i}", evidence) for i, m in enumerate(metrics)}
    yield from (figures[m] for m in metrics if m not in quiet)
    if quiet:
        yield f"<details><summary>{len(quiet)} metrics that do not respond, or are not compared</summary>"
        yield from (figures[m] for m in quiet)
        yield "</details>"


def _evidence(experiment: Experiment) -> Mapping[str, Mapping[str, Evidence]]:
    """Responses and null spreads of what was compared, by model and metric; empty if nothing was."""
    report = experiment.report
    if report is None or not report.symptoms:
        return {}
    from harness.fidelity import responses

    compared = tuple(report.symptoms["original"])
    sets = experiment.sets
    return responses(sets["original"], sets["proxy"], compared, mode=report.mode, onset=report.onset)


def _figure(experiment: Experiment, metric: str, name: str, evidence: Mapping[str, Mapping[str, Evidence]]) -> str:
    from plotly.subplots import make_subplots

    onset = experiment.request.fault.schedule.onset
    spacing = {"vertical_spacing": 0.07, "horizontal_spacing": 0.09, "row_heights": [0.62, 0.38]}
    figure = make_subplots(rows=2, cols=2, shared_xaxes=True, column_titles=list(MODELS), **spacing)
    traces = [t for arms in experiment.sets.values() for _, _, t in arms.arms()]
    last = max((t.steps[-1] for t in traces if t.steps), default=0)
    values = [v for t in traces for v in t.column(metric) if _finite(v)]
    log = bool(values) and min(values) > 0 and max(values) > WIDE * min(values)
    scale = "difference"
    for column, model in enumerate(MODELS, start=1):
        arms = experiment.sets[model]
        _levels(figure, column, {c: getattr(arms, c) for c in ("clean", "faulted")}, metric, log)
        found = evidence.get(model, {}).get(metric)
        if found is None:
            _differences(figure, column, arms, metric)
        else:
            scale = "log ratio" if found.scale.log else "clean spreads, asinh"
            _responses(figure, column, arms, metric, found, onset)
        mark = {"x": onset - 0.5, "line": {"dash": "dot", "color": "#444", "width": 1}, "col": column}
        figure.add_vline(
            row=1, annotation_text="onset", annotation_position="top left", annotation_font_size=11, **mark
        )
        figure.add_vline(row=2, **mark)
    unit = UNITS.get(metric.partition("/")[0], metric.replace("_", " "))
    figure.update_yaxes(title_text=f"{unit}, log scale" if log else unit, row=1)
    figure.update_yaxes(title_text=f"response<br>({scale})", row=2)
    if log:
        figure.update_yaxes(type="log", dtick=1, row=1)
    figure.update_yaxes(exponentformat="e")
    figure.update_xaxes(range=[-0.7, last + 0.7])
    figure.update_xaxes(title_text="step", row=2)
    legend = {"orientation": "h", "y": 1.06, "x": 1, "xanchor": "right", "yanchor": "bottom"}
    margin = {"l": 80, "r": 20, "t": 48, "b": 40}
    figure.update_layout(template="plotly_white", height=420, margin=margin, legend=legend)
    config = {"displayModeBar": False, "responsive": True}
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, config=config, div_id=name)
    return f"<h3>{_e(metric)}</h3>{drawn}"


def _finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _drawable(values: Iterable[float | None]) -> list[float | None]:
    return [v if _finite(v) else None for v in values]


def _word(value: float) -> str:
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _line(figure: Any, row: int, column: int, x: Any, y: Any, condition: str, **more: Any) -> None:
    import plotly.graph_objects as go

    style = {"color": COLOURS[condition], "width": more.pop("width", 1)}
    figure.add_trace(go.Scatter(x=list(x), y=list(y), mode="lines", line=style, **more), row=row, col=column)


def _levels(figure: Any, column: int, arms: Mapping[str, Mapping[int, Trace]], metric: str, log: bool) -> None:
    """Draw seeds and means, and crosses above them where a value is not finite."""
    columns = {c: {s: (t.steps, t.column(metric)) for s, t in by.items()} for c, by in arms.items()}
    for condition, by in columns.items():
        for seed, (steps, values) in by.items():
            told = f"{condition}, seed {seed}"
            _line(figure, 1, column, steps, _drawable(values), condition, opacity=0.4, showlegend=False, name=told)
    shown = [v for by in columns.values() for _, values in by.values() for v in values if _finite(v)]
    low, high = min(shown, default=0.0), max(shown, default=1.0)
    top = high * (high / low) ** 0.1 if log else high + 0.12 * ((high - low) or 1.0)
    for condition, by in columns.items():
        every = sorted({step for steps, _ in by.values() for step in steps})
        at = [dict(zip(*pair, strict=True)) for pair in by.values()]
        rows = [[values.get(step) for values in at] for step in every]
        means = [sum(v for v in r if v is not None) / len(r) if all(map(_finite, r)) else None for r in rows]
        entry = {"name": condition, "legendgroup": condition, "showlegend": column == 1}
        _line(figure, 1, column, every, means, condition, width=2.5, **entry)
        words = {
            s: {_word(v) for v in r if v is not None and not math.isfinite(v)} for s, r in zip(every, rows, strict=True)
        }
        _crosses(figure, 1, column, {s: "/".join(sorted(w)) for s, w in words.items() if w}, top, condition)


def _crosses(figure: Any, row: int, column: int, words: Mapping[int, str], top: float, condition: str) -> None:
    """Mark steps with values that are not finite; the word stands where it begins."""
    import plotly.graph_objects as go

    begins = [word if words.get(step - 1) != word else "" for step, word in words.items()]
    where = {"x": list(words), "y": [top] * len(words), "hovertext": list(words.values())}
    text = {"text": begins, "textposition": "bottom center", "textfont": {"color": COLOURS[condition]}}
    marker = {"symbol": "x", "color": COLOURS[condition], "size": 7}
    told = {"mode": "markers+text", "name": f"{condition}, not finite", "showlegend": False, "cliponaxis": False}
    if words:
        figure.add_trace(go.Scatter(marker=marker, **where, **text, **told), row=row, col=column)


def _band(figure: Any, column: int, steps: list[int], low: list[float | None], high: list[float | None]) -> None:
    style = {"width": 0, "hoverinfo": "skip", "legendgroup": "null"}
    _line(figure, 2, column, steps, low, "null", showlegend=False, **style)
    fill = {"fill": "tonexty", "fillcolor": "rgba(154, 160, 166, 0.35)"}
    _line(figure, 2, column, steps, high, "null", name="null spread", showlegend=column == 1, **style, **fill)


def _responses(figure: Any, column: int, arms: Any, metric: str, found: Evidence, onset: int) -> None:
    """Draw the responses that were compared, and the null spread of each step."""
    steps = [s for s in arms.clean[arms.seeds[0]].steps if s >= onset]
    spread = _drawable(found.noise.spread.tolist())
    _band(figure, column, steps, [None if v is None else -v for v in spread], spread)
    for seed, row in zip(arms.seeds, found.response.tolist(), strict=True):
        told = f"faulted - clean, seed {seed}"
        _line(figure, 2, column, steps, _drawable(row), "faulted", showlegend=False, name=told)
    words: dict[int, set[str]] = {}
    for seed in arms.seeds:
        for step, value in zip(arms.faulted[seed].steps, arms.faulted[seed].column(metric), strict=True):
            if step >= onset and value is not None and not _finite(value):
                words.setdefault(step, set()).add(_word(value))
    top = max(
        (abs(v) for v in [*found.response.ravel().tolist(), *spread] if v is not None and _finite(v)), default=1.0
    )
    _crosses(figure, 2, column, {s: "/".join(sorted(words[s])) for s in sorted(words)}, 1.1 * top or 1.0, "faulted")


def _differences(figure: Any, column: int, arms: Any, metric: str) -> None:
    """Draw plain differences, and the range of those of the null arms as the band."""
    null: dict[int, list[float]] = {}
    for condition, seed, trace in arms.arms():
        if condition == "clean" or seed not in arms.clean:
            continue
        clean = dict(zip(arms.clean[seed].steps, arms.clean[seed].column(metric), strict=True))
        pairs = zip(trace.steps, trace.column(metric), strict=True)
        found = {s: v - c for s, v in pairs if v is not None and (c := clean.get(s)) is not None}
        if condition == "faulted":
            told = f"faulted - clean, seed {seed}"
            _line(figure, 2, column, found, _drawable(found.values()), "faulted", showlegend=False, name=told)
            continue
        for step, value in found.items():
            null.setdefault(step, []).extend([value] if _finite(value) else [])
    low, high = ([f(null[s], default=None) for s in sorted(null)] for f in (min, max))
    _band(figure, column, sorted(null), low, high)


def _specification(experiment: Experiment, tracking: TrackingRef | None) -> str:
    request, fault = experiment.request, find(experiment.request.fault.name)
    schedule = request.fault.schedule
    rows = {
        "fault": f"{fault.name} at {describe_seam(fault.seam)}",
        "options": ", ".join(f"{k} = {v}" for k, v in request.fault.options) or "none",
        "schedule": f"onset {schedule.onset}, until {schedule.until}, every {schedule.every}",
        "mode": request.mode,
        "engine": request.engine,
        "seeds": ", ".join(map(str, request.seeds)),
        "steps": request.pair.steps,
        "ability (exact match)": ", ".join(f"{k} {v:.1%}" for k, v in experiment.ability.items()),
        "versions": ", ".join(f"{k} {v}" for k, v in experiment.versions.items()),
    }
    if tracking is not None:
        rows["MLflow"] = f"{tracking.tracking_uri}, experiment {tracking.experiment}, run {tracking.run_id}"
    cells = [[_e(k), f"<code>{_e(v)}</code>"] for k, v in rows.items()]
    cells.append(["seen in", "<br>".join(_link(url, url) for url in fault.seen_in)])
    pair = json.dumps(request.pair.model_dump(mode="json"), indent=2)
    traces = (
        [
            _e(arm.label),
            _link(run.trace_path.absolute().as_uri(), str(run.trace_path)),
            f"<code>{run.digest[:12]}</code>",
        ]
        for arm, run in experiment.runs
    )
    return (
        f"{_table((), cells)}<details><summary>Pair</summary><pre>{_e(pair)}</pre></details>"
        f"<details><summary>Traces</summary>{_table(('arm', 'file', 'digest'), traces)}</details>"
    )


def _link(url: str, text: str) -> str:
    known = url.startswith(("https://", "http://", "file://"))
    return f'<a href="{_e(url)}" rel="noreferrer">{_e(text)}</a>' if known else _e(text)
