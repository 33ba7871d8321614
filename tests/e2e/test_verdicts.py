"""From a pair file to a verdict, through the command line, on models that are really trained."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import Harness


def digests(data: dict[str, Any]) -> dict[tuple[str, int], str]:
    return {(r["arm"], r["seed"]): r["digest"] for r in data["runs"]}


def test_grad_overflow_is_reproduced_and_the_answer_does_not_depend_on_the_workers(
    harness: Harness, tmp_path: Path
) -> None:
    data = harness.run("grad_overflow", "--workers", "2", out=tmp_path / "a", check=0)
    assert data["verdict"] == "REPRODUCED"
    assert data["fired"] == {"original": 33, "proxy": 33}
    for model in ("original", "proxy"):
        symptom = data["symptoms"][model]["grad_norm"]
        assert (symptom["kind"], symptom["onset"], symptom["size"]) == ("nonfinite", 5, "inf")
        assert 0 < data["severity_to_trip"][model] < 65536
    assert 0 < data["cost"]["ratio"]["parameters"] < 1
    assert Path(data["report"]).stat().st_size > 1_000_000
    assert data["mlflow"]["run_id"]
    fresh = Harness(harness.home.with_name("home2"), harness.pair, harness.plug_ins)
    again = fresh.run("grad_overflow", "--workers", "1", out=tmp_path / "b", check=0)
    assert digests(again) == digests(data)
    assert again["fidelity"] == data["fidelity"]


def test_noop_has_no_effect(harness: Harness, tmp_path: Path) -> None:
    data = harness.run("noop", out=tmp_path, check=1)
    assert data["verdict"] == "NO_EFFECT"
    assert data["fired"] == {"original": 33, "proxy": 33}
    found = digests(data)
    assert all(found["original/faulted", s] == found["original/clean", s] for s in range(3))
    assert all(found["original/null", s] != found["original/clean", s] for s in range(3))


def test_a_remedy_is_judged_in_both_models(harness: Harness, tmp_path: Path) -> None:
    data = harness.run("grad_overflow", "--remedy", "fp32_grad_norm", out=tmp_path, check=0)
    assert data["verdict"] == "REPRODUCED"
    assert data["remedy"]["outcome"] == {"original": "RESTORED", "proxy": "RESTORED"}
    assert data["remedy"]["agrees"] is True
    assert "grad_norm" in data["remedy"]["cured"]["original"]
    found = digests(data)
    assert all(found[f"{m}/remedied", s] == found[f"{m}/clean", s] for m in ("original", "proxy") for s in range(3))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "fp32_grad_norm restores the clean response of the original" in page
    data = harness.run("stale_rollout_weights", "--remedy", "fp32_grad_norm", out=tmp_path)
    assert data["remedy"]["outcome"] == {"original": "NOT_RESTORED", "proxy": "NOT_RESTORED"}


def test_a_schedule_that_never_wakes_is_void(harness: Harness, tmp_path: Path) -> None:
    data = harness.run("grad_overflow", "--onset", "99", out=tmp_path, check=1)
    assert data["verdict"] == "VOID"
    assert "never fired" in data["reason"]


def test_a_plug_in_that_acts_on_the_original_only_is_not_reproduced(harness: Harness, tmp_path: Path) -> None:
    data = harness.run("only_large", out=tmp_path, check=1)
    assert data["verdict"] == "NOT_REPRODUCED"
    assert data["symptoms"]["original"]["grad_norm"]["kind"] == "nonfinite"
    assert data["symptoms"]["proxy"]["grad_norm"]["kind"] == "none"


def test_free_mode_samples_for_itself(harness: Harness, tmp_path: Path) -> None:
    data = harness.run("actor_update_omitted", out=tmp_path)
    assert data["mode"] == "free"
    assert data["verdict"] in ("REPRODUCED", "INCONCLUSIVE", "PARTIAL")
    for model in ("original", "proxy"):
        assert data["symptoms"][model]["update_norm"]["kind"] == "frozen"
        assert data["symptoms"][model]["update_norm"]["which"] == "zero"


@pytest.mark.deepspeed
def test_a_configuration_fault_acts_from_the_start_and_proves_itself(harness: Harness, tmp_path: Path) -> None:
    data = harness.run("deepspeed_clipping_default", "--seeds", "1", "--steps", "4", out=tmp_path)
    assert data["engine"] == "deepspeed"
    assert data["fired"] == {"original": 4, "proxy": 4}
    found = digests(data)
    assert found["original/twin", 0] == found["original/clean", 0]
    assert found["original/faulted", 0] != found["original/clean", 0]
    assert data["verdict"] == "INCONCLUSIVE"  # one seed is fewer than the minimum


def test_a_stage_that_deepspeed_owns_cannot_take_a_fault(harness: Harness, tmp_path: Path) -> None:
    argv = ["run", "--fault", "grad_overflow", "--engine", "deepspeed", "--pair", str(harness.pair)]
    result = harness(*argv, "--out", str(tmp_path), check=2)
    assert "needs stage clip, which engine deepspeed owns" in result.stderr
    assert not any(tmp_path.iterdir())


def test_killed_and_started_again_gives_the_same_result(harness: Harness, tmp_path: Path) -> None:
    argv = ["run", "--fault", "kl_sign_flipped", "--pair", str(harness.pair), "--json", "--seed-start", "7"]
    command = [sys.executable, "-c", "from harness.cli import main; main()", *argv]
    environment = harness.environment()
    store = harness.home / "store" / "runs"
    before = len(list(store.glob("*/*")))
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "killed")],
        env=environment,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while len(list(store.glob("*/*"))) < before + 3 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed").exists()
    resumed = json.loads(harness(*argv, "--out", str(tmp_path / "a")).stdout)
    fresh = Harness(harness.home.with_name("home3"), harness.pair, harness.plug_ins)
    clean = json.loads(fresh(*argv, "--out", str(tmp_path / "b")).stdout)
    assert digests(resumed) == digests(clean)
    assert resumed["verdict"] == clean["verdict"]


def test_a_damaged_original_is_refused_before_anything_runs(harness: Harness, tmp_path: Path) -> None:
    import yaml

    pair = yaml.safe_load(harness.pair.read_text())
    bad = tmp_path / "bad"
    shutil.copytree(pair["original"]["folder"], bad)
    tensors = load_file(bad / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    file = tmp_path / "pair.yaml"
    file.write_text(yaml.safe_dump({**pair, "original": {"folder": "bad"}}))
    result = harness("run", "--fault", "noop", "--pair", str(file), "--out", str(tmp_path / "out"), check=2)
    assert "tensor model.norm.weight holds 1 values that are NaN or infinite" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_proxy_that_cannot_do_the_task_is_refused(harness: Harness, tmp_path: Path) -> None:
    import yaml

    pair = yaml.safe_load(harness.pair.read_text())
    file = tmp_path / "pair.yaml"
    file.write_text(yaml.safe_dump({**pair, "proxy": {"experts": 2, "strategy": "first", "ability_floor": 0.9}}))
    result = harness("run", "--fault", "noop", "--pair", str(file), "--out", str(tmp_path / "out"), check=1)
    assert "fails the ability gate: it answers" in result.stderr
