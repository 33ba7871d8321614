"""``python -m experiments.benchmarks.importers``: megabytes per second and peak memory of reading long logs.

A log is noise (prompts and answers that a trainer prints) with metric records between, once under 5% of the bytes and
once nothing but records. Each is read in a process of its own, on one core.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECORDS = {
    "verl-console": "(TaskRunner pid=7) step:{s} - actor/pg_loss:0.{s:06d} - actor/grad_norm:0.5 - "
    "actor/entropy:0.25 - critic/rewards/mean:0.5 - response_length/mean:512.0 - actor/lr:1e-06\n",
    "trl": "{{'loss': 0.{s:06d}, 'grad_norm': 0.5, 'learning_rate': 1e-06, 'reward': 0.5, 'kl': 0.001}}\n",
    "megatron": " iteration {s:8d}/ 999999 | lm loss: 2.5E+00 | learning rate: 1.5E-04 | grad norm: 0.{s:06d} |\n",
    "mindspeed-rl": "[2025-01-01 00:00:00] iteration: {s} / 999999 | actor/pg_loss : 0.0012 | grad_norm : 0.3210\n",
    "verl-jsonl": '{{"step": {s}, "data": {{"actor/pg_loss": 0.{s:06d}, "actor/grad_norm": null}}}}\n',
}
NOISE = "(WorkerDict pid=9) user: what is 17 + 25? think step by step. assistant: 17 plus 25 makes forty-two, so 42.\n"


def write(path: Path, form: str, megabytes: int, dense: bool) -> int:
    """Write a log; return its number of records."""
    noise = "" if dense else NOISE * (25 * len(RECORDS[form]) // len(NOISE))
    size = step = 0
    with path.open("w") as file:
        while size < megabytes * 1e6:
            step += 1
            size += file.write(noise + RECORDS[form].format(s=step))
    return step


def measure(path: str, form: str) -> dict[str, float]:
    """Read a log: its records, seconds and peak memory in MB."""
    from harness.importers.reading import import_logs

    begin = time.perf_counter()
    (trace,) = import_logs([path], form).runs.values()
    seconds = time.perf_counter() - begin
    return {
        "records": len(trace),
        "seconds": seconds,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        sys.stdout.write(json.dumps(measure(*given.one)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for form in RECORDS:
            for dense in (False, True):
                path = Path(folder) / "log"
                megabytes = given.megabytes // (10 if dense else 1)
                records = write(path, form, megabytes, dense)
                command = [sys.executable, "-m", __spec__.name, "--one", str(path), form]
                found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
                if found["records"] != records:
                    raise SystemExit(f"{form}: {found['records']} of {records} records were read")
                rate = path.stat().st_size / 1e6 / found["seconds"]
                kind = "records only" if dense else "4% records"
                sys.stdout.write(f"{form:13s} {kind:12s} {rate:6.1f} MB/s, peak {found['peak_mb']:.0f} MB\n")
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
