"""``harness compare``: runs of any trainer, with and without clean twins, null arms and seeds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from harness.cli import app, arrange
from harness.errors import HarnessError
from harness.fidelity import compare as full_compare
from harness.fidelity.align import ArmSet
from harness.importers.arms import load_runs
from harness.trace import Trace, write_parquet

STEPS, ONSET = 40, 20


def trace(seed: int, factor: float = 1.0, nan_from: int | None = None, nudge: float = 0.0) -> Trace:
    """A healthy run by seed; from the onset on its gradient norm is ``factor`` times as large."""
    rng = np.random.default_rng([seed, 11])
    noise = {m: np.exp(0.05 * rng.standard_normal(STEPS)) for m in ("grad_norm", "entropy", "loss")}
    other = np.exp(nudge * np.random.default_rng([seed, 12]).standard_normal(STEPS))
    after = np.arange(STEPS) >= ONSET
    columns = {
        m: list(v * other * (np.where(after, factor, 1.0) if m == "grad_norm" else 1.0)) for m, v in noise.items()
    }
    if nan_from is not None:
        columns["loss"] = [v if s < nan_from else float("nan") for s, v in enumerate(columns["loss"])]
    return Trace.from_columns(range(STEPS), columns)


def console(t: Trace) -> str:
    names = {"loss": "actor/pg_loss", "grad_norm": "actor/grad_norm", "entropy": "actor/entropy"}
    rows = zip(t.steps, *(t.column(m) for m in names), strict=True)
    return "".join(
        f"(TaskRunner pid=1) step:{s} - "
        + " - ".join(f"{n}:{v!r}" for n, v in zip(names.values(), vs, strict=True))
        + "\n"
        for s, *vs in rows
    )


def folder(path: Path, traces: dict[int, Trace]) -> str:
    path.mkdir()
    for seed, t in traces.items():
        (path / f"run-seed{seed}.log").write_text(console(t))
    return str(path)


def run(*words: str) -> tuple[int, dict[str, object], str]:
    found = CliRunner().invoke(app, arrange([*words, "--json"])[0])
    if isinstance(found.exception, HarnessError):
        return found.exception.exit_code, {}, str(found.exception)
    return found.exit_code, json.loads(found.stdout), ""


def test_complete_arms_get_the_verdict_of_the_comparison_itself(tmp_path: Path) -> None:
    words, sets = [], []
    for model, first in (("original", 0), ("proxy", 10)):
        seeds = range(first, first + 3)
        arms = {
            "faulted": {k: trace(s, 3.0) for k, s in enumerate(seeds)},
            "clean": {k: trace(s) for k, s in enumerate(seeds)},
        }

        def spliced(s: int) -> Trace:
            moved = trace(s, nudge=0.01)
            return Trace((*trace(s)[:ONSET], *moved[ONSET:]))

        arms["null"] = {k: spliced(s) for k, s in enumerate(seeds)}
        sets.append(ArmSet(arms["clean"], arms["faulted"], arms["null"], dict.fromkeys(range(3), 1)))
        for kind, traces in arms.items():
            place = tmp_path / f"{model}-{kind}"
            place.mkdir()
            for s, t in traces.items():
                write_parquet(t, place / f"seed{s}.parquet")
            words += [str(place)] if kind == "faulted" else [f"--{kind}-{model}", str(place)]
    code, data, _ = run("compare", *words, "--onset", str(ONSET))
    report = full_compare(*sets, mode="free", onset=ONSET)
    assert report.verdict == "REPRODUCED"
    assert code == 0
    assert data["verdict"] == "REPRODUCED"
    assert data["weaker"] is False
    assert data["fidelity"] == json.loads(json.dumps(report.to_json()["fidelity"]))


@pytest.mark.parametrize("twins", [True, False])
@pytest.mark.parametrize(("factor", "verdict", "code"), [(3.0, "REPRODUCED", 0), (1.0, "NOT_REPRODUCED", 1)])
def test_logs_without_null_arms_are_compared_and_the_answer_says_what_it_rests_on(
    twins: bool, factor: float, verdict: str, code: int, tmp_path: Path
) -> None:
    words = [
        folder(tmp_path / "original", {s: trace(s, 3.0, nudge=0.005) for s in range(3)}),
        folder(tmp_path / "proxy", {s: trace(s + 10, factor, nudge=0.005) for s in range(3)}),
    ]
    if twins:
        words += ["--clean-original", folder(tmp_path / "co", {s: trace(s) for s in range(3)})]
        words += ["--clean-proxy", folder(tmp_path / "cp", {s: trace(s + 10) for s in range(3)})]
    exit_code, data, _ = run("compare", *words, "--onset", str(ONSET))
    assert (data["verdict"], exit_code) == (verdict, code)
    assert data["weaker"] is True
    assert data["evidence"] == ("clean twins" if twins else "own stretch before the onset")
    said = " ".join(data["warnings"])  # type: ignore[arg-type]
    assert ("stands for a null arm" in said) is twins
    assert ("a weaker answer" in said) is not twins
    symptom = data["symptoms"]["original"]["grad_norm"]  # type: ignore[index]
    assert (symptom["kind"], symptom["sign"], symptom["onset"]) == ("level_shift", 1, ONSET)
    assert abs(symptom["size"] - np.log(3.0)) < 0.1


def test_one_run_of_each_is_shown_but_never_decided(tmp_path: Path) -> None:
    words = []
    for name, s in (("a", 0), ("b", 10)):
        path = tmp_path / f"{name}.log"
        path.write_text(console(trace(s, 1.0, nan_from=25)))
        words.append(str(path))
    code, data, _ = run("compare", *words)
    assert code == 4
    assert data["verdict"] == "INCONCLUSIVE"
    assert data["details"]["without_doubt"] == "REPRODUCED"  # type: ignore[index]
    assert data["onsets"] == {"original": 25, "proxy": 25}  # the first NaN, found without --onset
    for model in ("original", "proxy"):
        symptom = data["symptoms"][model]["loss"]  # type: ignore[index]
        assert (symptom["kind"], symptom["which"], symptom["onset"]) == ("nonfinite", "nan", 25)


def test_too_short_a_past_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(console(trace(0, 3.0)))
    code, data, _ = run("compare", str(path), str(path), "--onset", "3")
    assert code == 4
    assert any("3 steps before its onset at step 3; 4 are needed" in w for w in data["warnings"])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{healthy}", "{healthy}"], "no symptom that marks an onset was found; say --onset"),
        (["{healthy}", "{healthy}", "--clean-original", "{healthy}"], "or of neither"),
        (["{healthy}", "{healthy}", "--null-original", "x", "--null-proxy", "x"], "beside the clean twins"),
        (["{empty}", "{healthy}"], "holds no file"),
    ],
)
def test_what_cannot_be_compared_is_a_sentence(words: list[str], said: str, tmp_path: Path) -> None:
    healthy, empty = tmp_path / "a.log", tmp_path / "empty"
    healthy.write_text(console(trace(0)))
    empty.mkdir()
    code, _, text = run("compare", *(w.format(healthy=healthy, empty=empty) for w in words))
    assert code == 2
    assert said in text


def test_seeds_are_what_the_names_say(tmp_path: Path) -> None:
    place = folder(tmp_path / "runs", {7: trace(0), 3: trace(1)})
    runs, _ = load_runs(place)
    assert sorted(runs) == [3, 7]
    assert runs[7].column("loss") == trace(0).column("loss")
    (tmp_path / "runs" / "other.log").write_text(console(trace(2)))
    assert sorted(load_runs(place)[0]) == [0, 1, 2]
