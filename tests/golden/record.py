"""Record the golden trace of the clean engine: ``python -m tests.golden.record``, from a clean tree only.

The checkpoint, the tape and the trace go into git. The tolerance of each metric and step is measured: the largest
deviation of twins whose weights were moved by one rounding unit, as far as it has grown by then, times a factor for the
fact that another kind of CPU rounds everywhere and not once.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.catalogue import find
from harness.seams import Schedule
from harness.trace import Trace, encode_line, read_jsonl
from tests.conftest import Bench, make_checkpoint

FOLDER = Path(__file__).parent
STEPS = 4
TWINS = 8
FACTOR = 16.0
FLOOR = 1e-6  # relative
# Counts move by whole tokens: two tokens of about 60 per step, and two of about 150 routed ones in the busiest expert.
COUNTS = {"clip_fraction": 2 / 60, "expert_imbalance": 2 / 150 * 8}


def tolerance(clean: Trace, twins: list[Trace]) -> dict[str, list[float]]:
    """Return the largest deviation to accept, by metric and step."""
    found = {}
    for name in clean.metrics:
        column = [v for v in clean.column(name) if v is not None]
        grown, worst = [], 0.0
        for step, value in enumerate(column):
            deviations = [abs((t.column(name)[step] or 0.0) - value) for t in twins]
            worst = max(worst, *deviations)
            grown.append(max(FACTOR * worst, FLOOR * abs(value), COUNTS.get(name, 1e-9)))
        found[name] = grown
    return found


def main() -> None:
    """Record everything."""
    if subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True).stdout:
        sys.exit("the tree is not clean: commit or stash first, so that the trace belongs to a commit")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "checkpoint")
        tape = Path(folder) / "tape.safetensors"
        bench = Bench(checkpoint, tape)
        bench.run("free", steps=STEPS, record=tape)
        clean, _ = bench.run("replay", steps=STEPS)
        nudge = find("null_weights_nudged")
        twins = [
            bench.run("replay", nudge.ref(schedule=Schedule(0, until=1)), steps=STEPS, seed=s)[0] for s in range(TWINS)
        ]
        shutil.rmtree(FOLDER / "checkpoint", ignore_errors=True)
        shutil.copytree(checkpoint, FOLDER / "checkpoint")
        shutil.copyfile(tape, FOLDER / "tape.safetensors")
    (FOLDER / "clean-replay.jsonl").write_text("".join(encode_line(r) + "\n" for r in clean), encoding="utf-8")
    (FOLDER / "tolerance.json").write_text(json.dumps(tolerance(clean, twins), indent=1), encoding="utf-8")
    assert read_jsonl(FOLDER / "clean-replay.jsonl") == clean


if __name__ == "__main__":
    main()
