"""An experiment made of hand-written traces, compared by the real comparator."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from harness.catalogue import find
from harness.experiment import Experiment
from harness.fidelity import ArmSet, compare
from harness.fleet import Failure
from harness.plan import Arm, ArmJob, Request
from harness.seams import Schedule
from harness.spec import RunSpec, load_pair
from harness.store import StoredRun
from harness.trace import StepRecord, Trace, write_parquet

ONSET, STEPS = 8, 24


def wave(seed: int, step: int, phase: float) -> float:
    return math.sin(1.7 * step + seed + phase)


def trace(model: str, seed: int, condition: str) -> Trace:
    """A healthy run; the faulted one's gradient norm is infinite and its entropy doubles from onset on."""
    phase = 0.0 if model == "original" else 2.0
    records = []
    for step in range(STEPS):
        late = step >= ONSET
        tiny = 1 + (1e-6 * wave(seed, step, 9.0) if condition == "null" and late else 0.0)
        values = {
            "loss": 0.1 * wave(seed, step, phase) * tiny,
            "grad_norm": (2 + 0.1 * wave(seed, step, phase + 1)) * tiny,
            "entropy": (1 + 0.02 * wave(seed, step, phase + 3)) * tiny,
            "<script>": 1.0,
        }
        if condition == "faulted" and late:
            values["grad_norm"] = math.inf
            values["entropy"] *= 2
        records.append(StepRecord(step, values))
    return Trace(records)


def experiment(folder: Path, *, crash: bool = False, seeds: int = 3, mode: str = "replay") -> Experiment:
    """Return an experiment as ``reproduce`` would."""
    fault = find("grad_overflow")
    request = Request(
        load_pair("tiny-qwen3-moe"), fault.ref(schedule=Schedule(ONSET)), mode, "torch", tuple(range(seeds))
    )
    if crash:
        failure = Failure("k", "original/tape seed 0", "its process died (exit code -9), 2 times", "crash")
        return Experiment(request, None, (failure,), (), {"original": 0.7, "proxy": 0.5, "chance": 0.0}, None, {})
    runs: list[tuple[Arm, StoredRun]] = []
    sets = {}
    for model in ("original", "proxy"):
        traces: dict[str, dict[int, Trace]] = {c: {} for c in ("clean", "faulted", "null", "tape")}
        for condition, by_seed in traces.items():
            for seed in range(seeds):
                by_seed[seed] = trace(model, seed, condition)
                runs.append(
                    (arm(request, model, condition, seed), stored(folder, model, condition, seed, by_seed[seed]))
                )
        sets[model] = ArmSet(traces["clean"], traces["faulted"], traces["null"], dict.fromkeys(range(seeds), 16))
    report = compare(sets["original"], sets["proxy"], mode=mode, onset=ONSET, expects=fault.expects)
    ability = {"original": 0.7, "proxy": 0.5, "chance": 0.0}
    return Experiment(request, report, (), tuple(runs), ability, {"original": 11.3, "proxy": None}, sets)


def arm(request: Request, model: str, condition: Any, seed: int) -> Arm:
    spec = RunSpec(weights="w", task=request.pair.task, rl=request.pair.rl, steps=STEPS, seed=seed)
    return Arm(model, condition, seed, ArmJob(f"{model}{condition}{seed}", spec, "folder", "store"))


def stored(folder: Path, model: str, condition: str, seed: int, found: Trace) -> StoredRun:
    key = f"{model}-{condition}-{seed}"
    (folder / key).mkdir(parents=True, exist_ok=True)
    write_parquet(found, folder / key / "trace.parquet")
    scale = 1.0 if model == "original" else 0.5
    sidecar = {"seconds_per_step": scale, "peak_rss_mb": 100 * scale, "parameters": int(1000 * scale)}
    return StoredRun(key, folder / key, found.digest(), 16 if condition == "faulted" else 0, sidecar)
