from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness.fleet import Event, Failure, Job, run_jobs
from tests.fleet_jobs import work


def job(key: str, do: str, **more: Any) -> Job:
    extra = {k: more.pop(k) for k in ("after", "fresh", "weight") if k in more}
    return Job(key, f"job {key}", {"do": do, **more}, **extra)


@pytest.mark.parametrize("workers", [1, 3])
def test_results_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    events: list[Event] = []
    jobs = [job(str(x), "square", x=x) for x in range(7)]
    assert run_jobs(work, jobs, workers=workers, progress=events.append) == {str(x): x**2 for x in range(7)}
    assert sorted(e.key for e in events if e.kind == "done") == [str(x) for x in range(7)]
    assert {(e.step, e.total) for e in events if e.kind == "step"} == {(1, 2)}


def test_a_worker_serves_many_jobs_with_one_thread_and_a_fresh_job_gets_its_own() -> None:
    before = os.environ.get("OMP_NUM_THREADS")
    jobs = [job("a", "pid"), job("b", "pid"), job("c", "pid", fresh=True), job("d", "pid", fresh=True)]
    results = run_jobs(work, jobs, workers=1)
    pids = {key: value[0] for key, value in results.items()}
    assert pids["a"] == pids["b"]
    assert len(set(pids.values())) == 3
    assert os.getpid() not in pids.values()
    assert {value[1] for value in results.values()} == {"1"}
    assert os.environ.get("OMP_NUM_THREADS") == before


def test_dependencies_come_first_and_a_failed_one_takes_its_followers_along(tmp_path: Path) -> None:
    file = str(tmp_path / "file")
    jobs = [
        job("reader", "read", file=file, after=("writer",), weight=9.0),
        job("writer", "write", file=file),
        job("orphan", "square", x=2, after=("bad",)),
        job("bad", "raise"),
        job("orphan of orphan", "square", x=2, after=("orphan",)),
    ]
    results = run_jobs(work, jobs, workers=2)
    assert results["reader"] == "written"
    assert results["bad"].kind == "error"
    assert results["bad"].error == "ValueError: on purpose"
    assert "work" in results["bad"].detail
    assert results["orphan"].kind == results["orphan of orphan"].kind == "skipped"
    assert "job bad, which failed: ValueError: on purpose" in results["orphan"].error


def test_a_users_error_keeps_its_sentence() -> None:
    result = run_jobs(work, [job("a", "refuse")], workers=1)["a"]
    assert isinstance(result, Failure)
    assert (result.error, result.kind) == ("cannot be done", "error")


def test_a_killed_worker_is_tried_again_and_then_given_up_while_others_go_on(tmp_path: Path) -> None:
    jobs = [
        job("dies", "die"),
        job("dies once", "die once", marker=str(tmp_path / "marker")),
        *[job(str(x), "square", x=x) for x in range(4)],
    ]
    results = run_jobs(work, jobs, workers=2)
    assert results["dies once"] == "second try"
    assert results["dies"].kind == "crash"
    assert results["dies"].error == "its process died (exit code -9), 2 times"
    assert [results[str(x)] for x in range(4)] == [0, 1, 4, 9]


def test_a_job_that_hangs_is_stopped() -> None:
    started = time.monotonic()
    results = run_jobs(
        work, [job("slow", "sleep", seconds=60), job("a", "square", x=3)], workers=2, timeout=1, retries=0
    )
    assert results["slow"].kind == "timeout"
    assert results["a"] == 9
    assert time.monotonic() - started < 30


def test_an_interrupt_leaves_no_process_behind() -> None:
    script = (
        "import os, signal, sys, threading, time\n"
        "from harness.fleet import Job, run_jobs\n"
        "from tests.fleet_jobs import work\n"
        "if __name__ == '__main__':\n"
        "    def stop(event):\n"
        "        if event.kind == 'start':\n"
        "            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    try:\n"
        "        run_jobs(work, [Job('a', 'a', {'do': 'sleep', 'seconds': 60})], workers=1, progress=stop)\n"
        "    except KeyboardInterrupt:\n"
        "        import multiprocessing\n"
        "        print('interrupted', len(multiprocessing.active_children()))\n"
    )
    path = Path(__file__).parent
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, cwd=path.parent, check=False
    )
    assert result.stdout == "interrupted 0\n", result.stderr
