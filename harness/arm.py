"""One arm in a worker process: a run, the fault that is installed in it, its trace, its tape."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from harness.catalogue import Entry, FaultSpec, find, find_remedy
from harness.inject import Injection, rewrite_config, steps_of
from harness.plan import ArmJob
from harness.rl import loop
from harness.seams import Config, FaultRef
from harness.spec import RLSpec, RunSpec, validate
from harness.store import Store, StoredRun
from harness.trace import StepRecord, Trace, TraceWriter


def run_arm(job: ArmJob, report: Callable[[int, int], None]) -> StoredRun:
    """Run one arm and commit it to the store.

    Args:
        job: The arm.
        report: Called with (finished steps, all steps).

    Returns:
        The committed run.
    """
    import torch
    import transformers

    from harness.rl.run import Run

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    forget_peak()
    os.environ.update(job.environment)
    store = Store(Path(job.store))
    folder = store.begin(job.key)
    fault = None if job.spec.fault_ref is None else find(job.spec.fault_ref.name)
    records: list[StepRecord] = []
    started = time.perf_counter()
    with ExitStack() as stack:
        spool = stack.enter_context(TraceWriter(folder / "spool.jsonl"))

        def emit(record: StepRecord) -> None:
            records.append(record)
            spool.write(record)
            report(len(records), job.spec.steps)

        run = Run(effective_spec(job.spec, fault), Path(job.folder), emit, _tape(store, job))
        tape = run.record_tape() if job.record else None
        host: Any = run
        installed = [stack.enter_context(Injection(*entry, host)) for entry in entries(job.spec, fault)]
        ready = time.perf_counter()
        loop.run(run.recorder.stages, run.recorder.steps(steps_of(installed, run.contexts())))
        seconds = time.perf_counter() - ready
    if tape is not None:
        tape.save(folder / "tape.safetensors")
    sidecar = {
        "seconds_per_step": seconds / job.spec.steps,
        "seconds_to_load": ready - started,
        "peak_rss_mb": peak_rss_mb(),
        "parameters": run.parameters,
        "effective": run.engine.effective(),
    }
    fired = installed[-1].fired if installed else 0  # a remedy may do without the fault's callable altogether
    return store.commit(job.key, folder, job.spec, Trace(records), fired, sidecar)


def entries(spec: RunSpec, fault: FaultSpec | None) -> list[tuple[Entry, FaultRef]]:
    """Return what is installed in a run, the outermost last: the fault, and around it the remedy."""
    found: list[tuple[Entry, FaultRef]] = []
    if fault is not None and spec.fault_ref is not None and not fault.config:
        found.append((fault, spec.fault_ref))
    if spec.remedy_ref is not None:
        found.append((find_remedy(spec.remedy_ref.name), spec.remedy_ref))
    return found


def effective_spec(spec: RunSpec, fault: FaultSpec | None) -> RunSpec:
    """Return the configuration that really runs: rewritten where a configuration fault is installed."""
    ref = spec.fault_ref
    if fault is None or ref is None or not isinstance(fault.seam, Config):
        return spec
    section: dict[str, Any] = getattr(spec, fault.seam.section)
    if fault.seam.section == "rl":
        new = rewrite_config(fault, ref, spec.rl.model_dump())
        return spec.model_copy(update={"rl": validate(RLSpec, new, f"rl settings as fault {fault.name} left them")})
    return spec.model_copy(update={fault.seam.section: rewrite_config(fault, ref, dict(section))})


def _tape(store: Store, job: ArmJob) -> Path | None:
    if job.tape is None:
        return None
    stored = store.get(job.tape)
    if stored is None or stored.tape_path is None:
        raise RuntimeError(f"the tape {job.tape} that this arm replays is not in the store {job.store}")
    return stored.tape_path


def forget_peak() -> None:
    """Start the measurement of the peak resident set anew, where the system allows it (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_rss_mb() -> float:
    """Largest resident set in MiB since ``forget_peak``."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**10
    except OSError:
        pass
    import psutil

    return float(psutil.Process().memory_info().rss) / 2**20
