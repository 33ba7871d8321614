"""Curves of an experiment as a small static SVG, written by hand: the same traces give the same bytes."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from harness.fidelity.metrics import METRICS

if TYPE_CHECKING:
    from harness.fidelity import ArmSet

WIDTH, HEIGHT = 300, 100  # of a panel's plotting area, in pixels
LEFT, TOP, GAP_X, GAP_Y = 64, 44, 70, 34
COLOURS = {"clean": "#2b6cb0", "faulted": "#c53030"}
LOG_RANGE = 30.0  # a positive metric that spans more than this factor is drawn on a log scale


def draw(title: str, metrics: Sequence[str], sets: Mapping[str, ArmSet], onset: int) -> str:
    """Draw clean and faulted arms of every seed, a row per metric, a column per model.

    Values that are not finite are crosses at the upper edge; a dashed line marks the onset.

    Args:
        title: Title.
        metrics: Names of metrics.
        sets: Traces by model.
        onset: First step at which the fault is awake.

    Returns:
        The SVG.
    """
    width = LEFT + len(sets) * (WIDTH + GAP_X)
    height = TOP + len(metrics) * (HEIGHT + GAP_Y)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="16" font-size="13" font-weight="bold">{html.escape(title)}</text>',
    ]
    for i, (condition, colour) in enumerate(COLOURS.items()):
        x = LEFT + 90 * i
        lines.append(f'<line x1="{x}" y1="28" x2="{x + 18}" y2="28" stroke="{colour}" stroke-width="2"/>')
        lines.append(f'<text x="{x + 23}" y="32">{condition}</text>')
    for row, metric in enumerate(metrics):
        for column, (model, arms) in enumerate(sets.items()):
            x, y = LEFT + column * (WIDTH + GAP_X), TOP + 14 + row * (HEIGHT + GAP_Y)
            lines.append(f'<g transform="translate({x},{y})">')
            lines.extend(_panel(f"{metric} ({model})", metric, arms, onset))
            lines.append("</g>")
    return "\n".join([*lines, "</svg>", ""])


def _panel(title: str, metric: str, arms: ArmSet, onset: int) -> Iterator[str]:
    columns = {
        condition: [trace.column(metric) for _, trace in sorted(getattr(arms, condition).items())]
        for condition in COLOURS
    }
    finite = [v for rows in columns.values() for row in rows for v in row if v is not None and math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    log = metric in METRICS and METRICS[metric].positive and low > 0 and high / low > LOG_RANGE
    if log:
        low, high = math.log10(low), math.log10(high)
    span = high - low or abs(high) or 1.0
    steps = max((len(row) for rows in columns.values() for row in rows), default=1)

    def x(step: int) -> float:
        return WIDTH * step / max(steps - 1, 1)

    def y(value: float) -> float:
        return HEIGHT * (1 - ((math.log10(value) if log else value) - low) / span)

    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#a0aec0"/>'
    yield f'<text x="0" y="-4">{html.escape(title)}{", log scale" if log else ""}</text>'
    for value, line in ((high, 9), (low, HEIGHT)):
        yield f'<text x="-5" y="{line}" text-anchor="end">{10**value if log else value:.3g}</text>'
    yield f'<text x="{WIDTH}" y="{HEIGHT + 13}" text-anchor="end">step {steps - 1}</text>'
    if 0 < onset < steps:
        at = f'x1="{x(onset):.1f}" y1="0" x2="{x(onset):.1f}" y2="{HEIGHT}"'
        yield f'<line {at} stroke="#718096" stroke-dasharray="3 3"/>'
    for condition, colour in COLOURS.items():
        for row in columns[condition]:
            for points in _runs(row):
                path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
                if len(points) == 1:
                    step, value = points[0]
                    yield f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="1.5" fill="{colour}"/>'
                else:
                    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.2" opacity="0.8"/>'
        crossed = {s for row in columns[condition] for s, v in enumerate(row) if v is not None and not math.isfinite(v)}
        for step in sorted(crossed):
            yield f'<text x="{x(step):.1f}" y="11" text-anchor="middle" fill="{colour}">x</text>'


def _runs(row: Sequence[float | None]) -> Iterator[list[tuple[int, float]]]:
    """Yield stretches of consecutive finite values as (step, value)."""
    points: list[tuple[int, float]] = []
    for step, value in enumerate(row):
        if value is not None and math.isfinite(value):
            points.append((step, value))
        elif points:
            yield points
            points = []
    if points:
        yield points
