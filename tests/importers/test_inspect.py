"""``harness inspect``: what is seen in one run, and what looks like a symptom and is none."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli import app, arrange
from harness.fidelity.signs import first_trouble, look
from harness.trace import Trace
from tests.importers.test_formats import MEGATRON, TRL, write

NAN = math.nan
N = 40
WAVE = [1.0 + 0.1 * ((7 * i) % 5 - 2) for i in range(N)]  # 0.8 to 1.2, without a trend
LATE = [i >= 24 for i in range(N)]


def of(**columns: list[float] | list[float | None]) -> Trace:
    return Trace.from_columns(range(1, 1 + len(next(iter(columns.values())))), {m: list(c) for m, c in columns.items()})


def seen(trace: Trace) -> list[tuple[str, str, str, int]]:
    return [(s.kind, s.metric, s.name, s.step) for s in look(trace)]


CASES = {
    "healthy": (of(loss=WAVE, grad_norm=WAVE, entropy=WAVE, kl=[0.01 * w for w in WAVE], reward=WAVE), []),
    "zero loss, healthy gradient": (of(loss=[0.0] * N, grad_norm=WAVE), [("benign", "loss", "loss 0", 1)]),
    "zero loss, no gradient": (
        of(loss=[0.0] * N, grad_norm=[0.0] * N),
        [("symptom", "loss", "loss 0", 1), ("symptom", "grad_norm", "no gradient", 1)],
    ),
    "kl is not computed": (of(loss=WAVE, grad_norm=WAVE, kl=[NAN] * N), [("benign", "kl", "kl not computed", 1)]),
    "kl becomes NaN": (of(loss=WAVE, kl=[*WAVE[:30], *[NAN] * 10]), [("symptom", "kl", "not finite", 31)]),
    "kl is NaN beside a sick loss": (
        of(loss=[*WAVE[:39], NAN], grad_norm=WAVE, kl=[NAN] * N),
        [("symptom", "kl", "not finite", 1), ("symptom", "loss", "not finite", 40)],
    ),
    "noise at the start": (
        of(grad_norm=[6.0, 34.0, 14.0, *WAVE]),
        [("benign", "grad_norm", "early noise", 2)],
    ),
    "a spike later": (of(grad_norm=[*WAVE[:30], 50.0, *WAVE[31:]]), [("symptom", "grad_norm", "spikes", 31)]),
    "the gradient grows": (
        of(grad_norm=[w * (8 if late else 1) for w, late in zip(WAVE, LATE, strict=True)]),
        [("symptom", "grad_norm", "gradient grows", 25)],
    ),
    "the entropy collapses": (
        of(entropy=[w * (0.1 if late else 1) for w, late in zip(WAVE, LATE, strict=True)]),
        [("symptom", "entropy", "entropy collapses", 25)],
    ),
    "the loss freezes": (of(loss=[*WAVE[:20], *[0.7] * 20]), [("symptom", "loss", "frozen", 21)]),
    "trainer and rollout disagree": (
        of(logprob_gap=[0.8 * w for w in WAVE]),
        [("symptom", "logprob_gap", "trainer and rollout disagree", 1)],
    ),
    "a sentinel": (of(entropy=[-1.0, *WAVE[1:]]), [("benign", "entropy", "sentinel", 1)]),
    "all cut": (
        of(grad_norm=[0.0] * 5, reward=[0.0] * 5, clipped_ratio=[1.0] * 5),
        [
            ("symptom", "reward", "no reward", 1),
            ("symptom", "grad_norm", "no gradient", 1),
            ("symptom", "clipped_ratio", "completions cut", 1),
        ],
    ),
    "any metric where none is known": (of(value=[1.0, 2.0, NAN]), [("symptom", "value", "not finite", 3)]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_seen_in_a_run(case: str) -> None:
    trace, expected = CASES[case]
    assert sorted(seen(trace)) == sorted(expected)


def test_the_first_symptom_marks_the_onset_and_look_alikes_do_not() -> None:
    runs = [of(loss=[0.0] * N, grad_norm=[*WAVE[:k], *[NAN] * (N - k)]) for k in (20, 24, 30)]
    assert first_trouble(runs) == 25
    assert first_trouble([CASES["zero loss, healthy gradient"][0]]) is None
    assert first_trouble([]) is None


def test_a_gradient_of_zero_is_explained_by_what_else_the_log_says() -> None:
    learnable = look(of(grad_norm=[0.0] * 4, reward_std=[0.13, 0.12, 0.15, 0.14]))
    assert "rewards differ within groups (reward_std about 0.14)" in learnable[0].sentence
    cut = look(of(grad_norm=[0.0] * 4, clipped_ratio=[0.97, 0.98, 0.99, 0.97]))
    assert "98% of the completions are cut" in cut[0].sentence


def test_a_loss_that_megatron_leaves_out_is_a_symptom(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, arrange(["inspect", write(tmp_path, "a.log", MEGATRON), "--json"])[0])
    data = json.loads(found.stdout)
    assert data["schema"] == "harness/inspect@1"
    (run,) = data["runs"]
    assert [(s["name"], s["step"]) for s in run["symptoms"]] == [("not finite", 6), ("loss left out", 6)]


def test_the_command_prints_a_line_per_sign(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["inspect", write(tmp_path, "a.log", TRL)])
    assert found.exit_code == 0
    assert "a.log: 3 records, 1 symptom\n" in found.stdout
    assert "step      2 grad_norm: not finite. 1 of 3 values are not finite, first nan at step 2" in found.stdout
