"""The two pictures of the page about the score: responses of both models on one axis, with what they agree in."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from experiments.benchmarks.fidelity import stages
from experiments.benchmarks.fidelity.bank import Bank, Subject, default_proxy
from harness.catalogue import find
from harness.fidelity import FidelityReport, compare, responses
from harness.fidelity.evidence import Evidence
from harness.fidelity.metrics import METRICS

WIDTH, HEIGHT = 250, 110  # of a panel's plotting area, in pixels
LEFT, TOP, GAP_X, GAP_Y, TOLD = 74, 66, 26, 44, 210
RED, GREY = "#c53030", "#a0aec0"

SHOWN = {
    "match": ("permute_map_not_inverted", ("loss", "grad_norm", "entropy")),
    "near-miss": ("norm_topk_prob_ignored", ("entropy", "update_norm", "logprob_gap")),
}
DOCS = Path(__file__).parents[3] / "docs"


def write(bank: Bank, pair: str) -> list[Path]:
    """Draw the two pictures of the page about the score from stored arms of the tuning seeds.

    Raises:
        SystemExit: If the arms of one of the faults are not stored.
    """
    onset, written = bank.pair(Subject(pair)).onset, []
    for what, (name, metrics) in SHOWN.items():
        fault = find(name)
        o, p = (bank.read(subject, fault, stages.TUNING) for subject in (Subject(pair), default_proxy(pair)))
        if o is None or p is None:
            raise SystemExit(f"the arms of {name} are not stored; run the stage tuning first")
        report = compare(o, p, mode=fault.mode, onset=onset)
        evidence = responses(o, p, metrics, mode=fault.mode, onset=onset)
        low, high = report.ci or (float("nan"), float("nan"))
        title = f"{name}: {report.verdict}, fidelity {report.overall:.2f} [{low:.2f}, {high:.2f}]"
        path = DOCS / f"score-{what}.svg"
        path.write_text(draw(title, report, evidence, metrics, onset), encoding="utf-8")
        written.append(path)
    return written


def draw(
    title: str, report: FidelityReport, evidence: dict[str, dict[str, Evidence]], metrics: Sequence[str], onset: int
) -> str:
    """Draw the responses of some metrics, a row per metric, original left and proxy right, with equal axes.

    Args:
        title: Title.
        report: The comparison.
        evidence: By model and metric, as ``harness.fidelity.responses`` gives it.
        metrics: Names of metrics that were compared.
        onset: Step at which the fault wakes.

    Returns:
        The SVG.
    """
    width = LEFT + 2 * (WIDTH + GAP_X) + TOLD
    height = TOP + len(metrics) * (HEIGHT + GAP_Y)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="bold">{html.escape(title)}</text>',
        f'<line x1="{LEFT}" y1="36" x2="{LEFT + 18}" y2="36" stroke="{RED}" stroke-width="2"/>',
        f'<text x="{LEFT + 23}" y="40">faulted minus clean, each seed</text>',
        f'<rect x="{LEFT + 205}" y="31" width="18" height="10" fill="{GREY}" opacity="0.5"/>',
        f'<text x="{LEFT + 228}" y="40">null spread: how far two healthy runs drift apart</text>',
    ]
    for row, metric in enumerate(metrics):
        both = [evidence[model][metric] for model in ("original", "proxy")]
        top = 1.05 * max(float(np.nanmax(np.abs(e.response))) for e in both) or 1.0
        for column, (model, e) in enumerate(zip(("original", "proxy"), both, strict=True)):
            x, y = LEFT + column * (WIDTH + GAP_X), TOP + row * (HEIGHT + GAP_Y)
            lines.append(f'<g transform="translate({x},{y})">')
            lines.extend(_panel(f"{metric}, {model}", e, top, onset, labelled=column == 0))
            lines.append("</g>")
        x, y = LEFT + 2 * (WIDTH + GAP_X) - 8, TOP + row * (HEIGHT + GAP_Y) + 14
        lines.extend(
            f'<text x="{x}" y="{y + 15 * i}">{html.escape(t)}</text>' for i, t in enumerate(_told(report, metric))
        )
    return "\n".join([*lines, "</svg>", ""])


def _told(report: FidelityReport, metric: str) -> list[str]:
    agreement = report.fidelity.get(metric)
    if agreement is None:
        return ["neither model responds"]
    parts = report.details["parts"][metric]
    kinds = [report.symptoms[m][metric].kind.replace("_", " ") for m in ("original", "proxy")]
    ratio = report.size_ratios.get(metric)
    return [
        f"agreement {agreement:.2f}, weight {report.weights[metric]:.2f}",
        f"kind {parts['kind']:.2f}: {kinds[0]} / {kinds[1]}",
        f"sign {parts['sign']:.2f}, onset {parts['onset']:.2f}",
        f"size {parts['size']:.2f}" + ("" if ratio is None else f": proxy {ratio:.2f} times"),
        f"shape {parts['shape']:.2f}",
        "primary" if METRICS[metric].primary else "secondary",
    ]


def _panel(title: str, e: Evidence, top: float, onset: int, *, labelled: bool) -> Iterator[str]:
    steps = e.response.shape[1]

    def x(step: int) -> float:
        return WIDTH * step / max(steps - 1, 1)

    def y(value: float) -> float:
        return HEIGHT * (1 - float(np.clip(value, -top, top)) / top) / 2

    unit = "log ratio" if e.scale.log else "clean spreads, asinh"
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="{GREY}"/>'
    yield f'<text x="0" y="-5" font-weight="bold">{html.escape(title)}</text>'
    if labelled:
        yield f'<text transform="translate(-52,{HEIGHT}) rotate(-90)">{unit}</text>'
        for value in (top, 0.0, -top):
            yield f'<text x="-5" y="{y(value) + 4:.1f}" text-anchor="end">{value:+.2g}</text>'
    upper = " ".join(f"{x(t):.1f},{y(v):.1f}" for t, v in enumerate(e.noise.spread))
    lower = " ".join(f"{x(t):.1f},{y(-v):.1f}" for t, v in reversed(list(enumerate(e.noise.spread))))
    yield f'<polygon points="{upper} {lower}" fill="{GREY}" opacity="0.5"/>'
    yield f'<line x1="0" y1="{y(0):.1f}" x2="{WIDTH}" y2="{y(0):.1f}" stroke="{GREY}"/>'
    for row in e.response:
        points = " ".join(f"{x(t):.1f},{y(v):.1f}" for t, v in enumerate(row) if np.isfinite(v))
        yield f'<polyline points="{points}" fill="none" stroke="{RED}" stroke-width="1.2" opacity="0.8"/>'
    yield f'<text x="0" y="{HEIGHT + 14}">step {onset}</text>'
    yield f'<text x="{WIDTH}" y="{HEIGHT + 14}" text-anchor="end">step {onset + steps - 1}</text>'
