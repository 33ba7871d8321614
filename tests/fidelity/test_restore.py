from __future__ import annotations

import math
from dataclasses import replace

import pytest

from harness.fidelity import FidelityReport, Symptom, restoration


def symptom(kind: str) -> Symptom:
    return Symptom(kind, 1, None if kind == "none" else 8, 1.0, 0.1, 1.0, None, (0.0, 0.0))


def report(original: str, proxy: str) -> FidelityReport:
    """A report in which the metrics of each word respond: l loss, g grad_norm, k kl."""
    names = {"l": "loss", "g": "grad_norm", "k": "kl"}
    found = {
        model: {name: symptom("drift" if letter in word else "none") for letter, name in names.items()}
        for model, word in (("original", original), ("proxy", proxy))
    }
    return FidelityReport("REPRODUCED", "because.", "replay", 8, {"original": 1, "proxy": 1}, symptoms=found)


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        ("lg", "", "RESTORED"),
        ("lg", "g", "PARTLY"),
        ("lg", "gk", "PARTLY"),
        ("lg", "lg", "NOT_RESTORED"),
        ("lg", "lgk", "NOT_RESTORED"),
        ("", "k", "NOTHING_TO_RESTORE"),
        ("", "", "NOTHING_TO_RESTORE"),
        ("l", "k", "PARTLY"),
    ],
)
def test_outcome(before: str, after: str, outcome: str) -> None:
    found = restoration("cure", report(before, "l"), report(after, ""))
    assert found.outcome == {"original": outcome, "proxy": "RESTORED"}
    assert found.agrees is (outcome == "RESTORED")


def test_lists_and_sentence() -> None:
    found = restoration("cure", report("lg", "g"), report("gk", ""))
    assert found.cured == {"original": ("loss",), "proxy": ("grad_norm",)}
    assert found.remaining == {"original": ("grad_norm",), "proxy": ()}
    assert found.added == {"original": ("kl",), "proxy": ()}
    assert found.reason == (
        "cure restores part of the clean response of the original (1 of 2 metrics still respond: grad_norm; only with "
        "it do kl), and restores the clean response of the proxy."
    )
    assert found.to_json()["remaining"] == {"original": ["grad_norm"], "proxy": []}


@pytest.mark.parametrize(
    ("before", "after", "eased"),
    [
        (4.0, 1.0, True),
        (4.0, 1.1, False),
        (-4.0, 1.0, True),
        (math.inf, 9.0, True),
        (math.nan, math.inf, False),
        (1.0, math.nan, False),
    ],
)
def test_a_response_that_has_shrunk_is_eased(before: float, after: float, eased: bool) -> None:
    def sized(size: float) -> FidelityReport:
        found = replace(symptom("level_shift"), size=size)
        symptoms = {model: {"loss": found} for model in ("original", "proxy")}
        return replace(report("", ""), symptoms=symptoms)

    found = restoration("cure", sized(before), sized(after))
    assert found.outcome["proxy"] == ("PARTLY" if eased else "NOT_RESTORED")
    assert found.eased["proxy"] == (("loss",) if eased else ())
    assert ("1 of them far less" in found.reason) is eased


def test_what_was_not_compared_is_unknown() -> None:
    void = FidelityReport("VOID", "it never fired.", "replay", 8, {"original": 0, "proxy": 0})
    for faulted, remedied in ((report("l", "l"), void), (void, report("", ""))):
        found = restoration("cure", faulted, remedied)
        assert found.agrees is None
        assert found.reason == "cure cannot be judged: it never fired."
