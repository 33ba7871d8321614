"""Every fault of the catalogue on its pair, against what it says is to be expected: a table for the lab log.

``python -m experiments.verdicts --seeds 8 [NAME ...]`` writes a line per fault as soon as it is known, and exits with 1
if a verdict or a claim is not as declared. What the store holds is not run again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from harness.catalogue import FaultSpec, catalogue, find
from harness.errors import HarnessError

if TYPE_CHECKING:
    from harness.experiment import Experiment

HEAD = ("fault", "mode", "verdict, fidelity [interval]", "expected", "claims not held", "seconds")


def run(fault: FaultSpec, seeds: int, workers: int) -> Experiment:
    """Run one fault on its pair at its defaults."""
    from harness.experiment import reproduce
    from harness.plan import Request
    from harness.seams import Schedule
    from harness.spec import load_pair
    from harness.store import harness_home

    pair = load_pair(fault.pair)
    engine: Any = fault.engine or "torch"
    ref = fault.ref(schedule=Schedule(0 if fault.config else pair.onset))
    request = Request(pair, ref, fault.mode, engine, tuple(range(seeds)))
    return reproduce(request, harness_home(), workers=workers, prepare_progress=lambda *_: None)


def broken_claims(claims: tuple[Any, ...]) -> list[str]:
    """Name the claims that do not hold, and in which model."""
    return [f"{c['claim']} ({m})" for c in claims for m in ("original", "proxy") if c[m] is not True]


def row(fault: FaultSpec, seeds: int, workers: int) -> tuple[list[str], bool]:
    """Return a fault's line of the table, and whether it is as declared.

    A claim has to hold in the original; in the proxy only where the verdict is to be REPRODUCED.
    """
    started = time.perf_counter()
    try:
        found = run(fault, seeds, workers)
        verdict, report = found.verdict, found.report
    except HarnessError as e:
        verdict, report = f"refused: {e}", None
    score, broken = "", []
    if report is not None:
        broken = broken_claims(report.claims)
        if report.overall is not None and report.ci is not None:
            score = f" {report.overall:.2f} [{report.ci[0]:.2f}, {report.ci[1]:.2f}]"
    matter = [b for b in broken if fault.expected_verdict == "REPRODUCED" or b.endswith("(original)")]
    seconds = f"{time.perf_counter() - started:.0f}"
    cells = [fault.name, fault.mode, verdict + score, fault.expected_verdict, "; ".join(broken), seconds]
    return cells, verdict == fault.expected_verdict and not matter


def lines(faults: list[FaultSpec], seeds: int, workers: int) -> Iterator[tuple[str, bool]]:
    """Yield the table line by line, each with whether all is as declared."""
    yield "| " + " | ".join(HEAD) + " |", True
    yield "|" + " --- |" * len(HEAD), True
    for fault in faults:
        cells, good = row(fault, seeds, workers)
        yield "| " + " | ".join(cells) + " |", good


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="faults; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    faults = [find(n) for n in given.names] or [f for f in catalogue().values() if not f.control]
    good = True
    for line, as_declared in lines(faults, given.seeds, given.workers):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        good = good and as_declared
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
