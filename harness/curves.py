"""The curves of a report: levels and responses of every metric, drawn with plotly, which only this file imports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from harness.markup import escape

if TYPE_CHECKING:
    from typing import TypeGuard

    from harness.experiment import Experiment
    from harness.fidelity.evidence import Evidence
    from harness.trace import Trace

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
WIDE = 1e3  # a metric of positive values whose largest and smallest differ by more is drawn on a log axis


def ordered(metrics: set[str]) -> list[str]:
    """Put metrics in the order of the comparison's table; those that are not in it come last."""
    from harness.fidelity.metrics import METRICS

    known = [m for m in (*MAIN, *METRICS) if m in metrics]
    return list(dict.fromkeys([*known, *sorted(metrics)]))


def plotly_js() -> str:
    """Return the library that draws the figures, to be written into the page."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def curves(experiment: Experiment) -> Iterator[str]:
    """Return the section of the curves, piece by piece: what is compared and responds first, the rest folded away."""
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
    metrics = ordered({m for arms in experiment.sets.values() for _, _, t in arms.arms() for m in t.metrics})
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
    return f"<h3>{escape(metric)}</h3>{drawn}"


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
