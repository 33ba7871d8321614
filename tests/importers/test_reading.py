"""What stands between records and runs: ranks, depth, folders, shares in percent."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.importers.reading import import_logs
from tests.importers.test_formats import GRAD_PROBE, OVERFLOW, write


def test_a_rank_that_lags_behind_repeats_a_step(tmp_path: Path) -> None:
    line = "step:  {s}  loss:  {s}.5  grad_norm: 1.0  tps: {t}\n"
    text = "".join(line.format(s=s, t=t) for s, t in ((1, 10), (2, 10), (1, 11), (3, 10), (2, 11), (3, 11)))
    found = import_logs([write(tmp_path, "a.log", text)])
    assert [list(t.steps) for t in found.runs.values()] == [[1, 2, 3]]
    assert found.runs["a.log"].column("tps") == [10.0, 10.0, 10.0]
    assert found.notes.skipped["repeated records of a step"] == 3
    other = text + line.format(s=1, t=10).replace("1.5", "8.5")
    found = import_logs([write(tmp_path, "b.log", other)])
    assert [list(t.steps) for t in found.runs.values()] == [[1, 2, 3], [1]]


def test_a_first_record_deep_in_a_log_is_found(tmp_path: Path) -> None:
    noise = "| a | b |\n|---|---|\n" + "loading weights of another shard, please wait\n" * 60_000
    found = import_logs([write(tmp_path, "a.log", noise + "step:7 - actor/pg_loss:0.5\n")])
    assert found.form == "verl-console"
    assert found.runs["a.log"].column("loss") == [0.5]


def test_a_share_in_percent_is_exact(tmp_path: Path) -> None:
    found = import_logs([write(tmp_path, "a.md", "| step | MFU |\n|---|---|\n| 1 | 27.44 % |\n")])
    assert found.runs["a.md"].column("MFU") == [0.2744]


def test_a_folder_that_msprobe_wrote_is_one_run(tmp_path: Path) -> None:
    for step in (10, 9, 100):
        write(tmp_path / "rank0", f"grad_summary_{step}.csv", GRAD_PROBE.replace("6.0,", f"{step}.0,"))
    found = import_logs([str(tmp_path / "rank0")])
    assert found.form == "msprobe-grad"
    (trace,) = found.runs.values()
    assert trace.steps == (9, 10, 100)
    assert trace.column("grad_norm/attention") == [9.0, 10.0, 100.0]
    for step in (3, 4):
        write(tmp_path / "dump", f"step{step}/rank0/dump.json", OVERFLOW)
    assert import_logs([str(tmp_path / "dump")]).runs["rank0"].steps == (3, 4)
    with pytest.raises(UsageError, match="a folder that no known tool wrote"):
        import_logs([str(tmp_path)])
    with pytest.raises(UsageError, match="the step of a gradient summary stands in its name"):
        import_logs([write(tmp_path, "other.csv", GRAD_PROBE)])


def test_of_several_micro_steps_the_last_counts(tmp_path: Path) -> None:
    text = "vpp_stage,name,step,micro_step,norm\n1,w,0,0,1.0\n1,w,0,1,3.0\n"
    found = import_logs([write(tmp_path, "grad_unreduced_0-0.csv", text)])
    assert found.runs["grad_unreduced_0-0.csv"].column("vp1:w/norm") == [3.0]
    assert found.notes.skipped["earlier micro-steps of a step"] == 1
