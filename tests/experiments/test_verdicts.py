from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from experiments import verdicts
from harness.catalogue import find
from harness.errors import UsageError


def experiment(verdict: str, *claims: tuple[str, bool | None, bool | None]) -> Any:
    held = tuple({"claim": c, "original": o, "proxy": p} for c, o, p in claims)
    return SimpleNamespace(
        verdict=verdict, report=SimpleNamespace(claims=held, overall=0.875, ci=(0.75, 0.9375) if verdict else None)
    )


@pytest.mark.parametrize(
    ("fault", "found", "good", "broken"),
    [
        ("grad_overflow", experiment("REPRODUCED", ("x rises", True, True)), True, ""),
        ("grad_overflow", experiment("PARTIAL", ("x rises", True, True)), False, ""),
        ("grad_overflow", experiment("REPRODUCED", ("x rises", True, False)), False, "x rises (proxy)"),
        ("norm_topk_prob_ignored", experiment("PARTIAL", ("x rises", True, False)), True, "x rises (proxy)"),
        ("norm_topk_prob_ignored", experiment("PARTIAL", ("x rises", False, True)), False, "x rises (original)"),
        ("norm_topk_prob_ignored", experiment("REPRODUCED", ("x rises", True, True)), False, ""),
    ],
)
def test_a_row_says_whether_a_fault_is_as_declared(
    fault: str, found: Any, good: bool, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "run", lambda *_: found)
    cells, as_declared = verdicts.row(find(fault), 3, 1)
    assert as_declared is good
    assert cells[2] == f"{found.verdict} 0.88 [0.75, 0.94]"
    assert cells[4] == broken


def test_a_refusal_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise UsageError("no such place")

    monkeypatch.setattr(verdicts, "run", refuse)
    cells, as_declared = verdicts.row(find("grad_overflow"), 3, 1)
    assert (cells[2], as_declared) == ("refused: no such place", False)
