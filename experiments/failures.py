"""Failure analysis: counts over reported failures of RL post-training, written to ``docs/failures.md``.

``failures.jsonl`` holds one reported failure a line: its name, class, stage, first symptom, platform, whether only a
mixture of experts can have it, and its reports. Class, stage and symptom were assigned by hand.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.catalogue import FaultSpec, catalogue

DATA = Path(__file__).with_name("failures.jsonl")
PAGE = Path(__file__).parents[1] / "docs" / "failures.md"
PLATFORMS = ("Ascend", "both", "not Ascend")
SYMPTOMS = {
    "non-finite": "a NaN or an infinity",
    "spike": "single steps far off",
    "standstill": "a metric is zero, or nothing is learnt any more",
    "level shift": "a constant offset or factor, at once",
    "drift": "a difference that grows over steps",
    "collapse": "reward gone, garbage, length at its cap",
    "train-inference gap": "log-probabilities of rollout and trainer disagree",
    "noise": "two healthy runs differ more than they should",
    "hang or crash": "no trace at all",
}


def failures() -> list[dict[str, Any]]:
    """Return the reported failures."""
    return [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]


def report_key(url: str) -> str:
    """Return ``org/repo#number`` of a GitHub report, whether it is called an issue or a pull; else the URL."""
    found = re.fullmatch(r"https://github\.com/([^/]+/[^/]+)/(?:issues|pull)/(\d+)", url)
    return f"{found[1]}#{found[2]}".lower() if found else url


def injected_by(failure: dict[str, Any], faults: list[FaultSpec]) -> list[str]:
    """Return the faults of the catalogue that inject a failure: of its name, or citing one of its reports."""
    reports = {report_key(url) for url in failure["reports"]}
    same = [f.name for f in faults if f.name == failure["name"]]
    return same or [f.name for f in faults if reports & {report_key(url) for url in f.seen_in}]


def _count(title: str, rows: list[dict[str, Any]], key: str, covered: dict[str, list[str]]) -> Iterator[str]:
    order = [name for name, _ in sorted(Counter(r[key] for r in rows).items(), key=lambda item: (-item[1], item[0]))]
    yield f"\n## By {title}\n"
    head = [title, "all", *PLATFORMS, "MoE only", "in the catalogue"]
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" * len(head)
    for name in order:
        yield _row(name, [r for r in rows if r[key] == name], covered)
    yield _row("**all**", rows, covered)


def _row(name: str, rows: list[dict[str, Any]], covered: dict[str, list[str]]) -> str:
    platforms = [sum(r["platform"] == p for r in rows) for p in PLATFORMS]
    counts = [len(rows), *platforms, sum(r["moe"] for r in rows), sum(bool(covered[r["name"]]) for r in rows)]
    return f"| {name} | " + " | ".join(map(str, counts)) + " |"


def page() -> str:
    """Return the page; the same data and catalogue give the same text."""
    rows = failures()
    faults = [f for f in catalogue().values() if not f.control]
    covered = {r["name"]: injected_by(r, faults) for r in rows}
    reports = {report_key(url) for r in rows for url in r["reports"]}
    lines = [
        "<!-- Written by `python -m experiments.failures`; edit experiments/failures.jsonl instead. -->",
        "# What fails in RL post-training",
        "",
        f"{len(rows)} failures, drawn from {len(reports)} public reports. A failure is *in the catalogue* if a fault "
        "of its name is, or one that cites one of its reports. *Ascend* and *both* are failures of which a report "
        "speaks of an Ascend NPU, alone or beside others; of the rest no report does, which does not show that an NPU "
        "is free of them. Class, stage and first symptom were assigned once, by hand, from a summary of each report.",
        "",
        "The sample is what people chose to report in public and what was found by looking: its shares say where to "
        "look, not how often things fail.",
    ]
    for title, key in (("class", "class"), ("stage", "stage"), ("symptom", "symptom")):
        lines += _count(title, rows, key, covered)
    lines += ["", *(f"- *{name}*: {meaning}" for name, meaning in SYMPTOMS.items())]
    lines += ["\n## All of them\n", "| failure | class | stage | symptom | platform | MoE only | reports | catalogue |"]
    lines.append("|" + " --- |" * 8)
    for r in sorted(rows, key=lambda r: (r["class"], r["name"])):
        links = " ".join(f"[{i}]({url})" for i, url in enumerate(r["reports"], start=1))
        found = ", ".join(f"[{n}](catalogue/{n}.md)" for n in covered[r["name"]])
        cells = [
            r["name"],
            r["class"],
            r["stage"],
            r["symptom"],
            r["platform"],
            "yes" if r["moe"] else "",
            links,
            found,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
