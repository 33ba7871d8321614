"""``python -m experiments.benchmarks.fidelity run --budget 30`` runs arms within a budget in minutes.

``... report`` judges those that are stored, ``... pictures`` draws the two of docs/score.md from them. All can be
repeated: a run goes on where the budget ended, a report is made of what is there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

from experiments.benchmarks.fidelity import stages
from experiments.benchmarks.fidelity.bank import Bank
from harness.plan import Arm
from harness.store import harness_home

STAGES = ("tuning", "held-out", "variants", "null", "coverage", "severity", "free")


def wanted(bank: Bank, pair: str, stage: str) -> Iterator[Arm]:
    """The arms of one stage."""
    if stage in ("tuning", "held-out"):
        return stages.catalogue_arms(bank, pair, stages.TUNING if stage == "tuning" else stages.HELD_OUT)
    if stage == "free":
        return stages.catalogue_arms(bank, pair, (*stages.TUNING, *stages.HELD_OUT), free=True)
    if stage == "variants":
        return stages.variant_arms(bank, pair, stages.TUNING)
    if stage == "severity":
        return stages.severity_arms(bank, pair, stages.TUNING)
    if stage == "coverage":
        return stages.coverage_arms(bank, pair)
    if stage == "null":
        return stages.null_arms(bank, pair)
    raise SystemExit(f"no stage {stage!r}; there are {', '.join(STAGES)}")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("run", "report", "pictures"))
    parser.add_argument("--pair", default="tiny-qwen3-moe")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--budget", type=float, default=60.0, help="minutes after which no more arms are started")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    bank = Bank(harness_home())
    if given.what == "report":
        from experiments.benchmarks.fidelity.report import report

        sys.stdout.write(report(bank, given.pair))
        return 0
    if given.what == "pictures":
        from experiments.benchmarks.fidelity.pictures import write

        for path in write(bank, given.pair):
            sys.stdout.write(f"{path}\n")
        return 0
    until = time.monotonic() + 60 * given.budget
    failures = 0
    for stage in given.stages.split(","):
        done, failed = bank.run(wanted(bank, given.pair, stage), until, given.workers)
        failures += failed
        sys.stdout.write(f"{stage}: {done} arms stored, {failed} failed\n")
        sys.stdout.flush()
        if time.monotonic() > until:
            break
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
