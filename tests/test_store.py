from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from harness import store as store_module
from harness.errors import HarnessError, MachineError
from harness.spec import RLSpec, RunSpec, TaskSpec
from harness.store import Store, code_digest, harness_home
from harness.trace import StepRecord, Trace

SPEC = RunSpec(weights="w", task=TaskSpec(), rl=RLSpec(), steps=2, seed=0)
TRACE = Trace([StepRecord(0, {"loss": 1.0, "grad_norm": float("inf")}), StepRecord(1, {"loss": float("nan")})])
KEY = "ab" + "0" * 30


def put(store: Store, key: str = KEY, trace: Trace = TRACE, *, tape: bytes | None = None) -> store_module.StoredRun:
    folder = store.begin(key)
    if tape is not None:
        (folder / "tape.safetensors").write_bytes(tape)
    return store.commit(key, folder, SPEC, trace, 3, {"seconds_per_step": 0.5})


def test_what_was_put_comes_back_bit_for_bit(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.get(KEY) is None
    put(store, tape=b"tape")
    run = Store(tmp_path).get(KEY)
    assert run is not None
    assert run.trace() == TRACE
    assert run.digest == TRACE.digest()
    assert run.fired == 3
    assert run.sidecar == {"seconds_per_step": 0.5}
    assert run.tape_path is not None
    assert run.tape_path.read_bytes() == b"tape"
    assert json.loads((run.folder / "spec.json").read_text())["weights"] == "w"
    assert [r.key for r in store.runs()] == [KEY]


@pytest.mark.parametrize("what", ["trace", "tape", "result", "digest"])
def test_a_damaged_run_is_dropped_and_not_trusted(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path)
    run = put(store, tape=b"tape")
    if what == "trace":
        run.trace_path.write_bytes(run.trace_path.read_bytes()[:-20])
    elif what == "tape":
        (run.folder / "tape.safetensors").write_bytes(b"tapf")
    elif what == "result":
        (run.folder / "result.json").write_text("{")
    else:
        other = Trace([StepRecord(0, {"loss": 2.0})])
        result = json.loads((run.folder / "result.json").read_text()) | {"digest": other.digest()}
        (run.folder / "result.json").write_text(json.dumps(result))
    with caplog.at_level(logging.WARNING):
        assert store.get(KEY) is None
    assert "damaged" in caplog.text
    assert not run.folder.exists()
    assert put(store).trace() == TRACE


def test_two_writers_of_the_same_run_agree_or_say_so(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store)
    assert put(store).digest == TRACE.digest()
    with pytest.raises(HarnessError, match="finished twice with different traces"):
        put(store, trace=Trace([StepRecord(0, {"loss": 2.0})]))
    run = store.get(KEY)
    assert run is not None
    assert run.trace() == TRACE


def test_what_a_dead_process_left_is_swept_and_never_counts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    stale = store.begin(KEY)
    dead = stale.with_name(f".{KEY}.{2**22 - 1}")  # above the largest process id of common systems
    stale.rename(dead)
    assert store.get(KEY) is None
    assert list(store.runs()) == []
    store.begin(KEY)
    assert not dead.exists()


def test_a_store_of_another_schema_is_refused(tmp_path: Path) -> None:
    Store(tmp_path)
    (tmp_path / "SCHEMA").write_text("harness/store@0")
    with pytest.raises(MachineError, match=r"has schema harness/store@0, this version reads harness/store@1"):
        Store(tmp_path)


def test_home_is_the_variable_and_empty_means_unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path / "h"))
    assert harness_home() == tmp_path / "h"
    monkeypatch.setenv("HARNESS_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert harness_home() == tmp_path / ".cache" / "harness"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path / "file" / "h"))
    with pytest.raises(MachineError, match="HARNESS_HOME"):
        harness_home()


def test_code_digest_sees_the_faults_own_file(tmp_path: Path) -> None:
    fault = tmp_path / "fault.py"
    fault.write_text("a = 1")
    first = code_digest([fault])
    assert first == code_digest([fault])
    fault.write_text("a = 2")
    assert code_digest([fault]) != first
    assert code_digest() not in (first, code_digest([fault]))
