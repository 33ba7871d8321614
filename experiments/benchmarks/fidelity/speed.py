"""``python -m experiments.benchmarks.fidelity.speed``: seconds and memory of a comparison, and how they grow.

Two models, five seeds, clean, faulted and null arms of twelve metrics each; the faulted arms shift at step 8. Every
size runs in a process of its own, sizes in turn, so that the peak memory is that size's and a slow moment hits both.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

METRICS = (
    "loss",
    "grad_norm",
    "entropy",
    "kl",
    "logprob_gap",
    "clip_fraction",
    "ratio_mean",
    "update_norm",
    "grad_norm/router",
    "grad_norm/experts",
    "router_entropy",
    "topk_mass",
)
SEEDS = 5
BOOTSTRAP = 1000
ONSET = 8


def measure(steps: int) -> dict[str, float]:
    """Compare once: seconds of the comparison, peak memory of the whole process in MB, and of it before comparing."""
    import numpy as np

    from harness.fidelity import ArmSet, compare
    from harness.trace import Trace

    rng = np.random.default_rng(0)

    def arms() -> ArmSet:
        clean, faulted, null = {}, {}, {}
        for seed in range(SEEDS):
            base = {m: 1 + 0.05 * rng.standard_normal(steps) for m in METRICS}
            late = np.arange(steps) >= ONSET
            drift = {m: np.where(late, v * np.exp(1e-6 * rng.standard_normal(steps)), v) for m, v in base.items()}
            shifted = {m: np.where(late, 1.3 * v, v) for m, v in base.items()}
            for into, columns in ((clean, base), (faulted, shifted), (null, drift)):
                into[seed] = Trace.from_columns(range(steps), {m: v.tolist() for m, v in columns.items()})
        return ArmSet(clean, faulted, null, dict.fromkeys(range(SEEDS), steps - ONSET))

    sets = arms(), arms()
    data = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    begin = time.perf_counter()
    report = compare(*sets, mode="replay", onset=ONSET, bootstrap=BOOTSTRAP)
    seconds = time.perf_counter() - begin
    if report.verdict != "REPRODUCED":
        raise SystemExit(f"the synthetic fault was to be REPRODUCED, not {report.verdict}: {report.reason}")
    return {
        "steps": steps,
        "seconds": seconds,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "data_mb": data,
    }


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        sys.stdout.write(json.dumps(measure(given.steps)))
        return 0
    found: dict[int, list[dict[str, float]]] = {}
    for _ in range(given.rounds):
        for steps in (given.steps // 2, given.steps):
            command = [sys.executable, "-m", __spec__.name, "--one", "--steps", str(steps)]
            found.setdefault(steps, []).append(
                json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
            )
    for steps, runs in found.items():
        seconds = sorted(r["seconds"] for r in runs)
        peak, data = max(r["peak_mb"] for r in runs), max(r["data_mb"] for r in runs)
        sys.stdout.write(
            f"{steps} steps x {len(METRICS)} metrics x {SEEDS} seeds, bootstrap {BOOTSTRAP}: "
            f"median {seconds[len(seconds) // 2]:.2f} s [{seconds[0]:.2f}, {seconds[-1]:.2f}], "
            f"peak {peak:.0f} MB, of which the traces {data:.0f} MB\n"
        )
    half, whole = found.values()
    ratios = sorted(w["seconds"] / h["seconds"] for h, w in zip(half, whole, strict=True))
    sys.stdout.write(
        f"twice the steps take {ratios[len(ratios) // 2]:.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}] times as long\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
