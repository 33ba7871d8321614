"""The report of an experiment: one HTML page that needs no network."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.catalogue import find
from harness.curves import MODELS, curves, ordered, plotly_js
from harness.markup import STYLE, escape, link, table
from harness.seams import describe_seam

if TYPE_CHECKING:
    from harness.experiment import Experiment
    from harness.fidelity import FidelityReport, Symptom
    from harness.tracking import TrackingRef

COST = (
    ("seconds per step", "seconds_per_step", "{:.3f}"),
    ("peak memory (MiB)", "peak_rss_mb", "{:,.0f}"),
    ("parameters", "parameters", "{:,.0f}"),
)
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
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "\n".join(_sections(experiment, tracking))
    title = f"{experiment.request.fault.name} on {experiment.request.pair.name}: {experiment.verdict}"
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style><script>{plotly_js()}</script></head><body>{body}<script>{SCRIPT}</script></body></html>"
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


def _sections(experiment: Experiment, tracking: TrackingRef | None) -> Iterator[str]:
    request, fault = experiment.request, find(experiment.request.fault.name)
    colour = {"REPRODUCED": "good", "INCONCLUSIVE": "open", "PARTIAL": "open"}.get(experiment.verdict, "bad")
    yield f"<h1>{escape(fault.name)} on {escape(request.pair.name)}</h1>"
    yield f"<p>{escape(fault.summary)}</p>"
    yield f'<p><span class="verdict {colour}">{escape(experiment.verdict)}</span> {escape(experiment.conclusion)}</p>'
    if experiment.failures:
        rows = ([escape(f.label), escape(f.kind), escape(f.error)] for f in experiment.failures)
        yield "<h2>Arms that failed</h2>" + table(("arm", "kind", "what happened"), rows)
    if experiment.report is not None and experiment.report.symptoms:
        yield "<h2>Symptoms and fidelity</h2>" + _symptoms(experiment) + _behind(experiment.report)
    if experiment.cost:
        yield "<h2>Cost</h2>" + table(("", *MODELS, "ratio"), cost_rows(experiment), numeric=3)
    if experiment.sets:
        yield from curves(experiment)
    yield "<h2>What was run</h2>" + _specification(experiment, tracking)


def _symptoms(experiment: Experiment) -> str:
    report = experiment.report
    assert report is not None
    rows = []
    for metric in ordered({m for found in report.symptoms.values() for m in found}):
        both = [report.symptoms[model].get(metric) for model in MODELS]
        if report.fidelity.get(metric) is None and all(s is None or s.kind == "none" for s in both):
            continue
        numbers = [
            format_number(report.onset_lags.get(metric), "{:+d}"),
            format_number(report.size_ratios.get(metric), "{:.2f}"),
            format_number(report.fidelity.get(metric), "{:.2f}"),
        ]
        rows.append([f"<code>{escape(metric)}</code>", *(escape(describe_symptom(s)) for s in both), *numbers])
    ci = "" if report.ci is None else f" [{report.ci[0]:.2f}, {report.ci[1]:.2f}]"
    parts = [f"<p>Overall fidelity: {'not scored' if report.overall is None else f'{report.overall:.2f}{ci}'}.</p>"]
    head = ("metric", "original", "proxy", "onset lag (steps)", "size ratio", "fidelity")
    parts.append(table(head, rows, numeric=3))
    parts.append("<p>Lag: onset in the proxy minus onset in the original. Size ratio: proxy over original.</p>")
    if experiment.severity_to_trip is not None:
        tripped = experiment.severity_to_trip.items()
        said = ", ".join(f"{m} {format_number(v, '{:.4g}') or 'none'}" for m, v in tripped)
        parts.append(f"<p>Smallest severity tried that trips: {escape(said)}.</p>")
    if report.claims:
        word = {True: "yes", False: "no", None: "not observable"}
        claims = ([escape(c["claim"]), *(word[c[model]] for model in MODELS)] for c in report.claims)
        parts.append("<h3>What the fault is expected to do</h3>" + table(("claim", *MODELS), claims))
    return "".join(parts)


PARTS = ("kind", "sign", "onset", "size", "shape")


def _behind(report: FidelityReport) -> str:
    """Return every number that the overall fidelity is made of, folded away."""
    rows = []
    for metric in ordered(set(report.symptoms["original"])):
        both = [report.symptoms[model].get(metric) for model in MODELS]
        parts = report.details.get("parts", {}).get(metric, {})
        rows.append(
            [
                f"<code>{escape(metric)}</code>",
                escape(report.details["units"].get(metric, "")),
                format_number(report.details["margins"].get(metric), "{:.3g}"),
                *(_in_null_units(s) for s in both),
                *(format_number(parts.get(part), "{:.2f}") for part in PARTS),
                format_number(report.fidelity.get(metric), "{:.2f}"),
                format_number(report.weights.get(metric), "{:.2f}"),
            ]
        )
    sizes = [f"{model}: size / null spread = null units" for model in MODELS]
    head = ("metric", "unit", "margin", *sizes, *PARTS, "agreement", "weight")
    told = (
        "<p>Agreement is kind times sign times the weighted mean of onset, size and shape; the weight says how far the "
        "larger response lies beyond the margin. The null spread is how far two healthy runs drift apart.</p>"
    )
    seeds = ", ".join(f"{model} {count}" for model, count in report.details["seeds"].items())
    facts = [f"bar {report.details['bar']:.2f}", f"seeds: {seeds}"]
    if report.details["undecided"]:
        facts.append(f"too noisy to tell: {', '.join(report.details['undecided'])}")
    lines = "".join(f"<p>{escape(line)}.</p>" for line in ("; ".join(facts), *_attenuation(report)))
    return f"<details><summary>Every number behind it</summary>{told}{table(head, rows, numeric=10)}{lines}</details>"


def _in_null_units(symptom: Symptom | None) -> str:
    if symptom is None:
        return ""
    if symptom.kind == "nonfinite":
        return escape(symptom.which)
    return f"{symptom.size:+.3g} / {symptom.null_spread:.2g} = {symptom.null_units:.3g}"


def _attenuation(report: FidelityReport) -> Iterator[str]:
    """Say what the healthy models predict of the size of a response in the expert layers, and what was observed."""
    words = {
        "topk_mass": ("mass of the chosen experts", "a fault that loses or scales that mass"),
        "expert_share": ("share of the experts in the squared gradient norm", "a small change of the expert gradients"),
    }
    for name, found in report.details["attenuation"].items():
        what, whose = words[name]
        values = ", ".join(f"{model} {found[model]:.3g}" for model in MODELS)
        yield f"{what}: {values}; predicts {found['size_ratio']:.2f} as size ratio of {whose}".capitalize()
    observed = {m: r for m, r in report.size_ratios.items() if m in ("entropy", "grad_norm", "update_norm")}
    if observed:
        yield "Observed size ratios: " + ", ".join(f"{m} {r:.2f}" for m, r in observed.items())


def cost_rows(experiment: Experiment) -> list[list[str]]:
    """Return the cost as text: name, original, proxy, ratio."""
    rows = []
    for title, key, form in COST:
        original, proxy, ratio = (experiment.cost.get(c, {}).get(key) for c in (*MODELS, "ratio"))
        rows.append([title, format_number(original, form), format_number(proxy, form), format_number(ratio, "{:.2f}")])
    return rows


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
    cells = [[escape(k), f"<code>{escape(v)}</code>"] for k, v in rows.items()]
    cells.append(["seen in", "<br>".join(link(url, url) for url in fault.seen_in)])
    pair = json.dumps(request.pair.model_dump(mode="json"), indent=2)
    traces = (
        [
            escape(arm.label),
            link(run.trace_path.absolute().as_uri(), str(run.trace_path)),
            f"<code>{run.digest[:12]}</code>",
        ]
        for arm, run in experiment.runs
    )
    return (
        f"{table((), cells)}<details><summary>Pair</summary><pre>{escape(pair)}</pre></details>"
        f"<details><summary>Traces</summary>{table(('arm', 'file', 'digest'), traces)}</details>"
    )
