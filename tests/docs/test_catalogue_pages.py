"""The committed pages are the ones that the source gives, and what they say is right."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

from harness.catalogue import catalogue, remedies
from harness.pages import INDEX, NOTE, pages
from harness.picture import HEIGHT, WIDTH, draw
from harness.trace import StepRecord, Trace
from tests.cli.test_run import run

FOLDER = Path(__file__).parents[2] / "docs" / "catalogue"


def test_committed_pages_are_up_to_date() -> None:
    expected = pages({path.stem for path in FOLDER.glob("*.svg")})
    found = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    stale = sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n))
    assert stale == [], "run: harness faults docs"
    assert {path.stem for path in FOLDER.glob("*.svg")} <= set(catalogue())


def test_every_link_between_pages_leads_somewhere() -> None:
    found = pages()
    for name, text in found.items():
        for target in re.findall(r"\]\(([\w.-]+)\)", text):
            assert target in found, f"{name} links to {target}"


def test_index_lists_every_fault_once_and_counts_them() -> None:
    text = pages()[INDEX]
    real = [f for f in catalogue().values() if not f.control]
    assert text.startswith(NOTE)
    assert f"{len(real)} faults in " in text
    assert f"and {len(remedies())} remedies" in text
    for fault in real:
        assert text.count(f"\n| [{fault.name}]({fault.name}.md) |") == 1
    assert "null_weights_nudged" not in text


def test_a_page_says_what_the_source_says() -> None:
    page = pages({"norm_topk_prob_ignored"})["norm_topk_prob_ignored.md"]
    fault = catalogue()["norm_topk_prob_ignored"]
    for url in fault.seen_in:
        assert f"- <{url}>" in page
    assert fault.sections["What breaks"][1:] in page
    assert "| expected verdict | PARTIAL |" in page
    assert "- `logprob_gap` rises" in page
    assert "(norm_topk_prob_ignored.svg)" in page
    assert "svg" not in pages()["norm_topk_prob_ignored.md"]


def test_docs_command_writes_and_clears(capsys: object, tmp_path: Path) -> None:
    (tmp_path / "gone.md").write_text(f"{NOTE}\n# gone\n", encoding="utf-8")
    (tmp_path / "mine.md").write_text("# mine\n", encoding="utf-8")
    (tmp_path / "gone.svg").write_text("<svg/>", encoding="utf-8")
    code, out, _ = run(["faults", "docs", "--out", str(tmp_path)], capsys)
    assert code == 0
    assert f"{len(pages())} pages, 0 pictures" in out
    assert not (tmp_path / "gone.md").exists()
    assert not (tmp_path / "gone.svg").exists()
    assert (tmp_path / "mine.md").exists()
    assert (tmp_path / INDEX).read_text(encoding="utf-8") == pages()[INDEX]


def arms(values: list[float]) -> SimpleNamespace:
    def trace(column: list[float]) -> Trace:
        return Trace([StepRecord(i, {"kl": v}) for i, v in enumerate(column)])

    return SimpleNamespace(clean={0: trace([1.0] * len(values))}, faulted={0: trace(values)})


def test_picture_scales_and_marks_what_is_not_finite() -> None:
    sets = {"original": arms([1.0, 2.0, 3.0, math.nan, math.inf]), "proxy": arms([1.0, 10.0, 100.0, 1000.0, 1000.0])}
    svg = draw("a < b", ["kl"], sets, onset=1)
    root = ElementTree.fromstring(svg)
    name = "{http://www.w3.org/2000/svg}"
    texts = ["".join(t.itertext()) for t in root.iter(f"{name}text")]
    assert "a < b" in texts
    assert texts.count("x") == 2
    assert "kl (original)" in texts
    assert "kl (proxy), log scale" in texts
    left, right = root.iter(f"{name}g")
    faulted = [p.get("points") for p in left.iter(f"{name}polyline")][1]
    assert faulted == f"0.0,{HEIGHT}.0 {WIDTH / 4:.1f},{HEIGHT / 2:.1f} {WIDTH / 2:.1f},0.0"
    faulted = [p.get("points") for p in right.iter(f"{name}polyline")][1]
    assert faulted.split()[1] == f"{WIDTH / 4:.1f},{HEIGHT * 2 / 3:.1f}"
    assert draw("a < b", ["kl"], sets, onset=1) == svg
