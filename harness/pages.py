"""The catalogue as pages: an index by family and a page per fault and remedy, generated from their source."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.catalogue import PAIR, Entry, FaultSpec, RemedySpec, catalogue, remedies, remedy_for
from harness.seams import describe_seam

if TYPE_CHECKING:
    from harness.experiment import Experiment

INDEX = "README.md"
NOTE = "<!-- Written by `harness faults docs`; edit the fault's own file instead. -->"


def pages(pictures: Collection[str] = ()) -> dict[str, str]:
    """Return every page of the catalogue.

    Args:
        pictures: Names of the faults of which there is a picture, ``NAME.svg`` beside the page.

    Returns:
        Text by file name; the same source gives the same text.
    """
    faults = [f for f in catalogue().values() if not f.control or f.name == "noop"]
    found = {INDEX: _index(faults, list(remedies().values()))}
    found.update({f"{f.name}.md": _join(_fault(f, f.name in pictures)) for f in faults})
    found.update({f"{r.name}.md": _join(_remedy(r)) for r in remedies().values()})
    return found


def _join(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _sentence(text: str) -> str:
    """Return a part of a docstring as a paragraph: a capital first, code in single backticks."""
    start = text[0].upper() if text.partition(" ")[0].isalpha() else text[0]
    return (start + text[1:]).replace("``", "`")


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    titles = list(head)
    yield "| " + " | ".join(titles) + " |"
    yield "|" + " --- |" * len(titles)
    for row in rows:
        yield "| " + " | ".join(map(_cell, row)) + " |"


def _link(name: str) -> str:
    return f"[{name}]({name}.md)"


def _index(faults: list[FaultSpec], every_remedy: list[RemedySpec]) -> str:
    real = [f for f in faults if not f.control]
    families = sorted({f.family for f in faults})
    lines = [
        NOTE,
        "# The catalogue of faults",
        "",
        f"{len(real)} faults in {len({f.family for f in real})} families, {sum(f.moe for f in real)} of which only a "
        f"mixture of experts can have, and {len(every_remedy)} remedies. Each cites its reports; each is shown on its "
        "pair with `harness run --fault NAME`, and meets its contract: `harness faults check NAME`.",
    ]
    for family in families:
        rows = [
            (_link(f.name), f.summary, describe_seam(f.seam), f.mode, "yes" if f.moe else "", f.expected_verdict)
            for f in faults
            if f.family == family
        ]
        lines += ["", f"## {family}", ""]
        lines += _table(("fault", "what is wrong", "seam", "mode", "MoE only", "expected"), rows)
    lines += ["", "## Remedies", ""]
    lines += _table(
        ("remedy", "what it does", "seam", "for"),
        [(_link(r.name), r.summary, describe_seam(r.seam), ", ".join(map(_link, r.for_))) for r in every_remedy],
    )
    return _join(lines)


def _head(entry: Entry, rows: dict[str, str]) -> Iterator[str]:
    yield NOTE
    yield f"# {entry.name}"
    yield ""
    yield entry.summary
    yield ""
    yield from _table(("", ""), [(k, v) for k, v in rows.items() if v])
    for title, text in entry.sections.items():
        yield f"\n## {title}\n"
        yield _sentence(text)


def _tail(entry: Entry) -> Iterator[str]:
    if entry.defaults:
        yield "\n## Options\n"
        yield from _table(("option", "default"), [(f"`{k}`", f"`{v!r}`") for k, v in entry.defaults.items()])
    if entry.seen_in:
        yield "\n## Reports\n"
        yield from (f"- <{url}>" for url in entry.seen_in)


def _fault(fault: FaultSpec, picture: bool) -> Iterator[str]:
    cure = remedy_for(fault)
    yield from _head(
        fault,
        {
            "family": fault.family,
            "seam": describe_seam(fault.seam),
            "mode": fault.mode,
            "engine": fault.engine or "any",
            "needs": ", ".join(fault.needs),
            "mixture of experts only": "yes" if fault.moe else "no",
            "severity": f"`{fault.severity}`" if fault.severity else "",
            "remedy": _link(cure) if cure else "",
            "looks like it": ", ".join(map(_link, fault.look_alikes)),
            "pair": fault.pair,
            "expected verdict": fault.expected_verdict,
            "because": fault.reason,
        },
    )
    if fault.expects:
        yield "\n## Signature\n"
        yield "Faulted minus clean, same model, same seed:\n"
        yield from (f"- `{claim.metric}` {claim.phrase}" for claim in fault.expects)
    if picture:
        yield f"\n![{fault.name} in the original and in the proxy]({fault.name}.svg)"
    yield from _tail(fault)
    pair = "" if fault.pair == PAIR else f" --pair {fault.pair}"
    severity = f" --set fault.{fault.severity}=VALUE" if fault.severity else ""
    yield "\n## Run it\n"
    yield f"    harness run --fault {fault.name}{pair} --seeds 8{severity}"


def _remedy(remedy: RemedySpec) -> Iterator[str]:
    yield from _head(remedy, {"for": ", ".join(map(_link, remedy.for_)), "seam": describe_seam(remedy.seam)})
    yield from _tail(remedy)


def picture(fault: FaultSpec, home: Path, workers: int) -> str:
    """Return the picture of a fault on its pair at its defaults; runs what the store does not hold.

    Args:
        fault: A fault that is no control.
        home: Where runs are kept.
        workers: Worker processes.

    Returns:
        An SVG.

    Raises:
        HarnessError: If an arm failed, with its reason.
    """
    from harness.errors import HarnessError
    from harness.experiment import reproduce
    from harness.picture import draw
    from harness.plan import Request
    from harness.seams import Schedule
    from harness.spec import load_pair

    pair = load_pair(fault.pair)
    onset = 0 if fault.config else pair.onset
    engine: Any = fault.engine or "torch"
    request = Request(pair, fault.ref(schedule=Schedule(onset)), fault.mode, engine, tuple(range(pair.seeds)))
    found = reproduce(request, home, workers=workers, prepare_progress=lambda *_: None)
    if found.report is None:
        raise HarnessError(found.reason)
    metrics = list(dict.fromkeys([*(c.metric for c in fault.expects), "grad_norm", "loss"]))
    return draw(_caption(found), metrics[: max(2, min(3, len(fault.expects)))], found.sets, onset)


def _caption(found: Experiment) -> str:
    request, report = found.request, found.report
    score = ""
    if report is not None and report.overall is not None and report.ci is not None:
        score = f" {report.overall:.2f} [{report.ci[0]:.2f}, {report.ci[1]:.2f}]"
    where = f"{request.fault.name} on {request.pair.name}, {request.mode}"
    return f"{where}, {len(request.seeds)} seeds: {found.verdict}{score}"
