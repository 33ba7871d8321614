"""The page of reported failures is current, and its counts are right."""

from __future__ import annotations

import re
from collections import Counter

from experiments.failures import PAGE, PLATFORMS, SYMPTOMS, failures, injected_by, page, report_key
from harness.catalogue import catalogue


def test_committed_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m experiments.failures"


def test_data_is_whole() -> None:
    rows = failures()
    keys = {"name", "class", "stage", "symptom", "platform", "moe", "reports"}
    assert all(set(r) == keys for r in rows)
    assert len({r["name"] for r in rows}) == len(rows) == 113
    assert {r["platform"] for r in rows} == set(PLATFORMS)
    assert {r["symptom"] for r in rows} == set(SYMPTOMS)
    assert all(re.fullmatch(r"https://github\.com/[^/]+/[^/]+/issues/\d+", u) for r in rows for u in r["reports"])
    assert all(r["reports"] for r in rows)


def test_counts_add_up() -> None:
    rows = failures()
    tables = re.split(r"^## ", page(), flags=re.MULTILINE)[1:4]
    for table, key in zip(tables, ("class", "stage", "symptom"), strict=True):
        counts = {}
        for line in table.splitlines():
            cells = [c.strip() for c in line.strip("|").split("|")]
            if len(cells) == 7 and cells[1].isdigit():
                counts[cells[0]] = list(map(int, cells[1:]))
        total = counts.pop("**all**")
        assert {name: c[0] for name, c in counts.items()} == Counter(r[key] for r in rows)
        assert [sum(c) for c in zip(*counts.values(), strict=True)] == total
        assert all(c[0] == sum(c[1:4]) for c in counts.values())


def test_an_issue_and_its_pull_request_are_one_report() -> None:
    assert report_key("https://github.com/A/b/pull/7") == report_key("https://github.com/a/b/issues/7") == "a/b#7"
    assert report_key("https://arxiv.org/abs/1") == "https://arxiv.org/abs/1"


def test_catalogue_is_found_by_name_or_by_report() -> None:
    faults = list(catalogue().values())
    by_name = {r["name"]: r for r in failures()}
    assert injected_by(by_name["kl_sign_flipped"], faults) == ["kl_sign_flipped"]
    assert injected_by(by_name["fp16_grad_norm_sumsq_overflow"], faults) == ["grad_overflow"]
    assert injected_by({"name": "nothing", "reports": ["https://github.com/no/where/issues/1"]}, faults) == []
