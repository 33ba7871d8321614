from __future__ import annotations

import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.offline
import pytest

from harness.experiment import Experiment
from harness.fidelity import Thresholds
from harness.fleet import Failure
from harness.report import cost_rows, describe_symptom, write_report
from harness.trace import StepRecord, Trace
from harness.tracking import TrackingRef
from tests.cli import fakes

EVIL = "</title><script>alert('x')</script>"


class Page(HTMLParser):
    """Collects the text, the title, the links, and everything that a browser would fetch."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.title = ""
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        if tag == "script":
            self.scripts.append("")
        for name, value in attrs:
            if tag == "a" and name == "href":  # a link is followed by a reader, not by the page
                self.links.append(value or "")
            elif name in ("src", "href", "srcset", "data", "action", "poster"):
                self.fetched.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside == "script":
            self.scripts[-1] += data
        elif inside == "title":
            self.title += data
        elif inside == "style":
            assert "@import" not in data
            assert "url(" not in data
        else:
            self.text.append(data)


def write(found: Experiment, folder: Path, **more: Any) -> tuple[str, Page]:
    source = write_report(found, folder / "report.html", **more).read_text(encoding="utf-8")
    return source, Page(source)


def figure(source: str, metric: str) -> list[dict[str, Any]]:
    """The curves of a metric, as they are given to Plotly."""
    start = source.index(f"<h3>{metric}</h3>")
    at = source.index("[", source.index("Plotly.newPlot(", start))
    curves: list[dict[str, Any]] = json.JSONDecoder().raw_decode(source, at)[0]
    return curves


def changed(
    found: Experiment, model: str, seed: int, step: int, metric: str, value: float, condition: str = "faulted"
) -> Experiment:
    """The same experiment, with one value of one arm replaced."""
    arms = found.sets[model]
    before = getattr(arms, condition)
    records = [StepRecord(r.step, {**r.metrics, metric: value}) if r.step == step else r for r in before[seed]]
    after: dict[str, Any] = {condition: {**before, seed: Trace(records)}}
    return replace(found, sets={**found.sets, model: replace(arms, **after)})


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return fakes.experiment(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def page(found: Experiment, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Page]:
    return write(found, tmp_path_factory.mktemp("page"))


def test_says_what_was_found(page: tuple[str, Page], found: Experiment) -> None:
    _, seen = page
    text = " ".join(seen.text)
    assert seen.title == "grad_overflow on tiny-qwen3-moe: REPRODUCED"
    assert "REPRODUCED" in text
    assert found.reason in text
    assert "becomes inf at step 8" in text
    assert "level shift up at step 8" in text
    assert "Smallest severity tried that trips: original 11.3, proxy none." in text
    assert "grad_norm becomes non-finite yes yes" in text
    assert "stage clip" in text
    assert "multiplier = 65536.0" in text
    assert "onset 8, until None, every 1" in text


def test_is_one_page_that_fetches_nothing(page: tuple[str, Page], found: Experiment) -> None:
    source, seen = page
    assert seen.fetched == []
    assert source.count(plotly.offline.get_plotlyjs()) == 1
    assert "https://github.com/facebookresearch/fairscale/issues/263" in seen.links
    traces = {run.trace_path.as_uri() for _, run in found.runs}
    assert traces <= set(seen.links)
    assert {link.partition(":")[0] for link in seen.links} == {"https", "file"}


def test_figures_of_what_does_not_respond_are_folded_away(page: tuple[str, Page]) -> None:
    source, _ = page
    folded = source.index("<details><summary>2 metrics")  # loss, and the one that is not compared
    assert source.index("<h3>grad_norm</h3>") < source.index("<h3>entropy</h3>") < folded
    assert folded < source.index("<h3>loss</h3>") < source.index("<h3>&lt;script&gt;</h3>")


def test_the_same_experiment_gives_the_same_bytes(page: tuple[str, Page], found: Experiment, tmp_path: Path) -> None:
    assert write(found, tmp_path)[0] == page[0]


def test_curves_are_the_traces_and_their_means(page: tuple[str, Page], found: Experiment) -> None:
    curves = figure(page[0], "entropy")
    for axis, model in (("x", "original"), ("x2", "proxy")):
        mine = [c for c in curves if c["xaxis"] == axis]
        for condition in ("clean", "faulted"):
            traces = getattr(found.sets[model], condition)
            for seed, trace in traces.items():
                (thin,) = [c for c in mine if c.get("name") == f"{condition}, seed {seed}"]
                assert thin["y"] == trace.column("entropy")
                assert thin["line"]["width"] < 2
            (thick,) = [c for c in mine if c.get("name") == condition]
            columns = [trace.column("entropy") for trace in traces.values()]
            assert thick["y"] == pytest.approx([math.fsum(v) / 3 for v in zip(*columns, strict=True)])
            assert thick["line"]["width"] > 2
    assert [c["name"] for c in curves if c.get("showlegend")] == ["clean", "faulted", "null spread"]


def test_responses_are_log_ratios_over_the_null_spread(page: tuple[str, Page], found: Experiment) -> None:
    curves = [c for c in figure(page[0], "entropy") if c["xaxis"] == "x3"]
    lower, upper = (c for c in curves if c["line"]["width"] == 0)
    assert lower["x"] == upper["x"] == list(range(fakes.ONSET, fakes.STEPS))
    assert lower["y"] == [-v for v in upper["y"]]
    arms = found.sets["original"]
    for seed in range(3):
        (drawn,) = [c for c in curves if c.get("name") == f"faulted - clean, seed {seed}"]
        clean, faulted, null = (
            part[seed].column("entropy")[fakes.ONSET :] for part in (arms.clean, arms.faulted, arms.null)
        )
        # eps is 1e-4 of the median clean value, about 1
        assert drawn["y"] == pytest.approx([math.log(f / c) for f, c in zip(faulted, clean, strict=True)], abs=2e-4)
        drift = [abs(math.log(n / c)) for n, c in zip(null, clean, strict=True)]
        assert all(d < band for d, band in zip(drift, upper["y"], strict=True))


def test_values_that_are_not_finite_stand_at_the_top_with_the_word(page: tuple[str, Page], found: Experiment) -> None:
    for axis, model in (("x", "original"), ("x2", "proxy")):
        curves = [c for c in figure(page[0], "grad_norm") if c["xaxis"] == axis]
        (crosses,) = [c for c in curves if c["mode"] == "markers+text"]
        assert crosses["x"] == list(range(fakes.ONSET, fakes.STEPS))
        assert crosses["text"] == ["inf"] + [""] * 15
        highest = max(v for t in found.sets[model].clean.values() for v in t.column("grad_norm") if v is not None)
        assert min(crosses["y"]) > highest
        (mean,) = [c for c in curves if c.get("name") == "faulted"]
        assert mean["y"][fakes.ONSET :] == [None] * 16


def test_nan_and_minus_infinity_are_told_apart(found: Experiment, tmp_path: Path) -> None:
    sick = changed(changed(found, "original", 0, 10, "entropy", math.nan), "original", 1, 12, "entropy", -math.inf)
    sick = changed(sick, "original", 1, 10, "entropy", math.inf)
    curves = figure(write(sick, tmp_path)[0], "entropy")
    (levels,) = [c for c in curves if c["mode"] == "markers+text" and c["xaxis"] == "x"]
    assert dict(zip(levels["x"], levels["text"], strict=True)) == {10: "inf/nan", 12: "-inf"}
    (responses,) = [c for c in curves if c["mode"] == "markers+text" and c["xaxis"] == "x3"]
    assert dict(zip(responses["x"], responses["text"], strict=True)) == {10: "inf/nan", 12: "-inf"}
    assert not any(c["mode"] == "markers+text" and c["xaxis"] in ("x2", "x4") for c in curves)


def test_everything_is_escaped(found: Experiment, tmp_path: Path) -> None:
    pair = found.request.pair.model_copy(update={"name": EVIL})
    assert found.report is not None
    report = replace(found.report, reason=f"because {EVIL}")
    evil = replace(found, request=replace(found.request, pair=pair), report=report, ability={EVIL: 0.5})
    tracking = TrackingRef(f"http://x/{EVIL}", EVIL, EVIL)
    source, seen = write(evil, tmp_path, tracking=tracking)
    assert "alert('x')" not in "".join(seen.scripts)
    assert "<script>alert" not in source
    assert EVIL in seen.title
    assert f"because {EVIL}" in " ".join(seen.text)
    assert figure(source, "&lt;script&gt;")  # a metric of that name, drawn


def test_a_crash_names_the_arms_that_failed(tmp_path: Path) -> None:
    crashed = fakes.experiment(tmp_path, crash=True)
    more = Failure("k2", "proxy/clean seed 1", "out of <memory>", "error")
    _, seen = write(replace(crashed, failures=(*crashed.failures, more)), tmp_path)
    text = " ".join(seen.text)
    assert seen.title.endswith("CRASHED")
    assert "original/tape seed 0 failed: its process died (exit code -9), 2 times (and 1 more arms)" in text
    assert "proxy/clean seed 1 error out of <memory>" in text


def test_without_a_comparison_plain_differences_are_drawn(found: Experiment, tmp_path: Path) -> None:
    assert found.report is not None
    report = replace(found.report, verdict="VOID", symptoms={}, fidelity={}, onset_lags={}, size_ratios={})
    short = {0: found.sets["original"].faulted[0].window(0, 20)}  # an arm that ended early, seeds that are not there
    arms = replace(found.sets["original"], faulted=short)
    void = replace(found, report=report, sets={**found.sets, "original": arms})
    source, seen = write(changed(void, "proxy", 0, 12, "loss", math.nan, "null"), tmp_path)
    assert seen.title.endswith("VOID")
    curves = figure(source, "loss")
    (drawn,) = [c for c in curves if c.get("name") == "faulted - clean, seed 0" and c["xaxis"] == "x3"]
    clean, faulted = (part[0].column("loss") for part in (arms.clean, arms.faulted))
    assert drawn["x"] == list(range(20))
    assert drawn["y"] == [f - c for f, c in zip(faulted, clean[:20], strict=True)]
    assert len([c for c in curves if c.get("name", "").startswith("faulted - clean")]) == 1 + 3
    lower, upper = (c["y"][12] for c in curves if c["xaxis"] == "x4" and c["line"]["width"] == 0)
    proxy = found.sets["proxy"]
    others = [proxy.null[seed].column("loss")[12] - proxy.clean[seed].column("loss")[12] for seed in (1, 2)]
    assert (lower, upper) == (min(others), max(others))


def test_a_page_that_cannot_be_made_leaves_the_old_one(
    found: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old", encoding="utf-8")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        write_report(found, path)
    assert path.read_text(encoding="utf-8") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_cost_and_symptoms_in_words(found: Experiment) -> None:
    assert cost_rows(found) == [
        ["seconds per step", "1.000", "0.500", "0.50"],
        ["peak memory (MiB)", "100", "50", "0.50"],
        ["parameters", "1,000", "500", "0.50"],
    ]
    assert found.report is not None
    assert describe_symptom(found.report.symptoms["original"]["loss"]) == "none"
    assert describe_symptom(None) == "not measured"
    frozen = replace(found.report.symptoms["original"]["entropy"], kind="frozen", which="zero", onset=9)
    assert describe_symptom(frozen) == "frozen (zero) at step 9"


def test_every_number_behind_the_score_is_on_the_page(page: tuple[str, Page], found: Experiment) -> None:
    source, _ = page
    report = found.report
    assert report is not None
    section = source[source.index("Every number behind it") :].partition("</details>")[0]
    rows = {}
    for row in section.split("<tr>")[2:]:
        cells = [cell.partition(">")[2].partition("</td>")[0] for cell in row.split("<td")[1:]]
        rows[cells[0].removeprefix("<code>").removesuffix("</code>")] = cells
    assert set(rows) == set(report.symptoms["original"])
    entropy, symptom = rows["entropy"], report.symptoms["original"]["entropy"]
    size, _, spread = entropy[3].partition(" = ")[0].partition(" / ")
    assert float(size) == pytest.approx(symptom.size, rel=5e-3)
    assert float(entropy[3].partition(" = ")[2]) == pytest.approx(abs(float(size)) / float(spread), rel=0.06)
    kind, sign, onset, extent, shape, agreement = map(float, entropy[5:11])
    # the rule of harness/fidelity/score.py, with the weights as they are printed there
    t = Thresholds()
    combined = kind * sign * (t.onset_weight * onset + t.size_weight * extent + t.shape_weight * shape)
    assert agreement == pytest.approx(combined, abs=0.02)
    assert rows["grad_norm"][3] == "inf"
    assert "bar 0.70; seeds: original 3, proxy 3." in section
