"""Runs jobs on local worker processes that are preloaded once and survive the death of any of them."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from harness.errors import HarnessError

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "DS_ACCELERATOR": "cpu",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Job:
    """One piece of work.

    Attributes:
        key: Its identity.
        label: What it is called in front of a user.
        payload: First argument of the function; picklable.
        after: Keys of jobs that must have succeeded first.
        fresh: Give it a process of its own, which ends with it.
        weight: Expected cost; heavier jobs start first.
    """

    key: str
    label: str
    payload: Any
    after: tuple[str, ...] = ()
    fresh: bool = False
    weight: float = 1.0


@dataclass(frozen=True)
class Failure:
    """A job that could not be done.

    Attributes:
        key: Its identity.
        label: What it is called in front of a user.
        error: One sentence.
        kind: ``error`` raised, ``crash`` of the process, ``timeout``, or ``skipped`` since another job failed.
        detail: Traceback, for ``--debug``.
    """

    key: str
    label: str
    error: str
    kind: Literal["error", "crash", "timeout", "skipped"]
    detail: str = ""


@dataclass(frozen=True)
class Event:
    """Something happened to a job: ``start``, ``step``, ``done``, ``failed`` or ``retry``.

    ``queued`` comes first and once, with the number of jobs as ``total``.
    """

    kind: str
    key: str
    label: str
    step: int = 0
    total: int = 0


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    job: Job | None = None
    started: float = 0.0


@dataclass
class _State:
    waiting: list[Job]
    results: dict[str, Any] = field(default_factory=dict)
    tries: dict[str, int] = field(default_factory=dict)


def _serve(pipe: Connection, function: Callable[[Any, Callable[[int, int], None]], Any]) -> None:
    """Run in a worker: answer jobs until the pipe closes."""
    with suppress(KeyboardInterrupt, EOFError, BrokenPipeError):
        while True:
            payload = pipe.recv()
            try:
                result = function(payload, lambda step, total: pipe.send(("step", (step, total))))
                pipe.send(("done", result))
            except HarnessError as e:
                pipe.send(("error", (str(e), traceback.format_exc())))
            except Exception as e:  # whatever a job raises is its result, not the end of the worker
                pipe.send(("error", (f"{type(e).__name__}: {e}", traceback.format_exc())))


class Fleet:
    """Local worker processes; see ``run_jobs``."""

    def __init__(
        self,
        function: Callable[[Any, Callable[[int, int], None]], Any],
        workers: int,
        preload: tuple[str, ...],
        progress: Callable[[Event], None],
        timeout: float | None,
        retries: int,
    ) -> None:
        self._function, self._size = function, max(1, workers)
        self._progress, self._timeout, self._retries = progress, timeout, retries
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["harness.fleet", *preload])
        self._workers: list[_Worker] = []

    def run(self, jobs: Sequence[Job]) -> dict[str, Any]:
        """Run the jobs; returns result or ``Failure`` by key."""
        state = _State(sorted(jobs, key=lambda j: (-j.weight, jobs.index(j))))
        self._progress(Event("queued", "", "", total=len(jobs)))
        with _environment(ENVIRONMENT):
            try:
                while state.waiting or any(w.job for w in self._workers):
                    self._skip_orphans(state)
                    self._start(state)
                    self._collect(state)
            finally:
                for worker in list(self._workers):
                    self._stop(worker, kill=worker.job is not None)
        return state.results

    def _ready(self, state: _State) -> Job | None:
        known = {j.key for j in state.waiting} | {w.job.key for w in self._workers if w.job}
        return next((j for j in state.waiting if not any(k in known for k in j.after)), None)

    def _skip_orphans(self, state: _State) -> None:
        for job in list(state.waiting):
            failed = [k for k in job.after if isinstance(state.results.get(k), Failure)]
            if failed:
                state.waiting.remove(job)
                cause: Failure = state.results[failed[0]]
                self._fail(state, job, f"it needs {cause.label}, which failed: {cause.error}", "skipped")

    def _start(self, state: _State) -> None:
        while sum(w.job is not None for w in self._workers) < self._size:
            job = self._ready(state)
            if job is None:
                return
            state.waiting.remove(job)
            idle = None if job.fresh else next((w for w in self._workers if w.job is None), None)
            worker = idle or self._spawn()
            worker.job, worker.started = job, time.monotonic()
            self._progress(Event("start", job.key, job.label))
            with suppress(BrokenPipeError):  # a worker that died at once is noticed when its pipe is read
                worker.pipe.send(job.payload)

    def _spawn(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._function), daemon=True)
        process.start()
        theirs.close()
        worker = _Worker(process, ours)
        self._workers.append(worker)
        return worker

    def _collect(self, state: _State) -> None:
        busy = [w for w in self._workers if w.job]
        if not busy:
            return
        ready = wait([w.pipe for w in busy], timeout=1.0)
        for worker in busy:
            if worker.pipe in ready:
                self._receive(state, worker)
            elif self._timeout is not None and time.monotonic() - worker.started > self._timeout:
                self._lost(state, worker, f"it took longer than {self._timeout:g} seconds", "timeout")

    def _receive(self, state: _State, worker: _Worker) -> None:
        job = worker.job
        assert job is not None
        try:
            kind, value = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join(5)
            self._lost(state, worker, f"its process died (exit code {worker.process.exitcode})", "crash")
            return
        if kind == "step":
            self._progress(Event("step", job.key, job.label, *value))
            return
        worker.job = None
        if job.fresh:
            self._stop(worker)
        if kind == "error":
            self._fail(state, job, value[0], "error", value[1])
        else:
            state.results[job.key] = value
            self._progress(Event("done", job.key, job.label))

    def _lost(self, state: _State, worker: _Worker, error: str, kind: Literal["crash", "timeout"]) -> None:
        job = worker.job
        assert job is not None
        self._stop(worker, kill=True)
        tries = state.tries[job.key] = state.tries.get(job.key, 0) + 1
        if tries <= self._retries:
            self._progress(Event("retry", job.key, job.label))
            state.waiting.insert(0, job)
        else:
            self._fail(state, job, f"{error}, {tries} times", kind)

    def _fail(
        self,
        state: _State,
        job: Job,
        error: str,
        kind: Literal["error", "crash", "timeout", "skipped"],
        detail: str = "",
    ) -> None:
        state.results[job.key] = Failure(job.key, job.label, error, kind, detail)
        self._progress(Event("failed", job.key, job.label))

    def _stop(self, worker: _Worker, *, kill: bool = False) -> None:
        self._workers.remove(worker)
        worker.pipe.close()
        if kill:
            worker.process.kill()
        worker.process.join(5)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.process.close()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run_jobs(
    function: Callable[[Any, Callable[[int, int], None]], Any],
    jobs: Sequence[Job],
    *,
    workers: int,
    preload: tuple[str, ...] = (),
    progress: Callable[[Event], None] | None = None,
    timeout: float | None = None,
    retries: int = 1,
) -> dict[str, Any]:
    """Run jobs on local processes.

    Workers are forked from a server that has imported ``preload`` once; each serves many jobs, with one thread. A job
    whose process dies or hangs is tried again, then reported as a ``Failure`` while the others go on. On an interrupt
    all workers are stopped.

    Args:
        function: ``function(payload, report)``, importable by name; ``report(step, total)`` is for progress.
        jobs: What to run.
        workers: Number of processes.
        preload: Modules to import before forking.
        progress: Called with events.
        timeout: Seconds that one job may take.
        retries: How often a job is tried again after its process was lost.

    Returns:
        Result or ``Failure`` by key.
    """
    if not jobs:
        return {}
    fleet = Fleet(function, workers, preload, progress or (lambda _event: None), timeout, retries)
    return fleet.run(list(jobs))
