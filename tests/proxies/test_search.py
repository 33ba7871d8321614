from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from proxies.build import build
from proxies.compare import Cell, compare, read_log, table
from proxies.profile import Profile, profile
from proxies.search import SearchContext, load_model
from proxies.select import searches, select, strategies

Batches = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def measured(original: Path, batches: Batches) -> Profile:
    return profile(original, batches, outputs=True)


@pytest.fixture
def context(original: Path, measured: Profile, batches: Batches) -> SearchContext:
    return SearchContext.load(original, measured, batches)


def divergence(original: Path, pruned: Any, batches: Batches) -> float:
    """Token by token, with the probability of the following token as weight."""
    whole = load_model(original)[0]
    total = weights = 0.0
    for tokens, mask in batches:
        with torch.no_grad():
            p = whole(input_ids=tokens, attention_mask=mask).logits.double().softmax(-1)
            q = pruned(input_ids=tokens, attention_mask=mask).logits.double().softmax(-1)
        for b, t in product(range(tokens.shape[0]), range(tokens.shape[1] - 1)):
            if mask[b, t] and mask[b, t + 1]:
                weight = float(p[b, t, tokens[b, t + 1]])
                total += weight * float((p[b, t] * (p[b, t] / q[b, t]).log()).sum())
                weights += weight
    return total / weights


def test_divergence_is_that_of_the_proxy_on_disk(
    original: Path, context: SearchContext, batches: Batches, tmp_path: Path
) -> None:
    manifest = build(original, tmp_path / "proxy", 3, batches, strategy_name="facility")
    kept = {int(layer): experts for layer, experts in manifest["kept_experts"].items()}
    expected = divergence(original, load_model(tmp_path / "proxy")[0], batches)
    assert context.kl(kept) == pytest.approx(expected, rel=1e-4)
    assert sum(context.parts(kept)) == pytest.approx(expected, rel=1e-4)
    assert context.evaluations == 2


def test_a_whole_model_does_not_diverge_and_is_whole_again_after_pruning(context: SearchContext) -> None:
    pruned = context.kl({0: [0, 1], 2: [5, 7]})
    assert pruned > 1e-3
    assert context.kl({}) == pytest.approx(0.0, abs=1e-6)
    assert context.kl({0: [1, 0], 2: [7, 5]}) == pruned  # order does not matter


def test_lowers_compares_sums_and_may_give_up(context: SearchContext) -> None:
    kept = {0: [0, 1, 2], 2: [5, 6, 7]}
    parts = context.parts(kept)
    assert context.lowers(kept, parts) is None  # equal is not lower
    better = context.lowers(kept, [2 * part for part in parts])
    assert better == parts
    assert context.lowers(kept, [0.5 * parts[0], *[9.0] * (len(parts) - 1)]) is None  # given up on the first batch


def test_estimated_exchanges_are_the_slope_of_the_divergence(
    original: Path, context: SearchContext, batches: Batches
) -> None:
    """The estimate for the last layer, against finite differences along the change of that layer's output."""
    kept = {0: [0, 2, 5], 2: [1, 3, 6]}
    estimates = context.exchange_estimates(kept, tokens=10_000)[2]
    assert torch.isinf(estimates[:, kept[2]]).all()
    base = context.kl(kept)
    model = context._pruned.model

    def moved(other: list[int], step: float) -> float:
        captured: list[torch.Tensor] = []
        layer = model.model.layers[2]

        def grab(_m: Any, _a: Any, out: torch.Tensor) -> None:
            captured.append(out)

        context._pruned.keep({0: kept[0], 2: other})
        handle = layer.mlp.register_forward_hook(grab)
        with torch.no_grad():
            for ids, mask in batches:
                model(input_ids=ids, attention_mask=mask, use_cache=False)
        handle.remove()
        context._pruned.keep(kept)
        targets = iter(captured)

        def shift(_m: Any, _a: Any, out: torch.Tensor) -> torch.Tensor:
            return out + step * (next(targets) - out)

        handle = layer.mlp.register_forward_hook(shift)
        try:
            return context.kl(kept)
        finally:
            handle.remove()

    for position, into in ((0, 0), (1, 7), (2, 4)):
        other = sorted({*kept[2], into} - {kept[2][position]})
        step = 1e-2
        slope = (moved(other, step) - moved(other, -step)) / (2 * step)
        assert float(estimates[position, into]) == pytest.approx(slope, rel=2e-2, abs=2e-4)
    assert base > 0


def test_swap_lowers_the_divergence_of_its_best_start_within_its_evaluations_and_is_deterministic(
    original: Path, measured: Profile, batches: Batches
) -> None:
    def run(**options: Any) -> tuple[dict[int, list[int]], SearchContext]:
        context = SearchContext.load(original, measured, batches)
        return select(measured, 3, "swap", options=options, seed=1, context=lambda: context), context

    kept, context = run(evaluations=60)
    assert context.evaluations <= 60
    starts = [context.kl(select(measured, 3, name, seed=1)) for name in ("facility", "saliency", "random")]
    assert context.kl(kept) < min(starts)
    assert run(evaluations=60)[0] == kept
    assert run(evaluations=3)[0] in [select(measured, 3, name, seed=1) for name in ("facility", "saliency", "random")]


def test_sequential_takes_the_second_layer_from_a_profile_behind_the_first(
    original: Path, measured: Profile, batches: Batches, context: SearchContext, tmp_path: Path
) -> None:
    kept = select(measured, 3, "sequential", context=lambda: context)
    assert kept[0] == select(measured, 3, "facility")[0]  # nothing is pruned before the first layer
    behind = context.profile_behind(2, {0: kept[0]})
    again = context.profile_behind(2, {})
    torch.testing.assert_close(again.saliency, measured.layers[2].saliency)
    assert not torch.allclose(behind.saliency, again.saliency, rtol=1e-3)
    assert kept[2] == select(Profile({2: behind}, 1, ""), 3, "facility")[2]


def test_every_strategy_builds_a_proxy(original: Path, batches: Batches, tmp_path: Path) -> None:
    for name in strategies():
        options = {"evaluations": 10} if name == "swap" else {}
        manifest = build(original, tmp_path / name, 3, batches, strategy_name=name, options=options)
        assert all(len(experts) == 3 for experts in manifest["kept_experts"].values())
    assert {name for name in strategies() if searches(name)} == {"swap", "sequential"}


def test_comparison_resumes_and_its_table_is_right(original: Path, batches: Batches, tmp_path: Path) -> None:
    calls: list[int] = []

    def score(model: Any) -> float:
        calls.append(len(model.model.layers[0].mlp.gate.weight))
        return {8: 0.9, 3: 0.4, 2: 0.2}[calls[-1]]

    log = tmp_path / "log.jsonl"
    draws = [batches, batches[:2]]
    cells = compare(original, ["random", "facility"], [3, 2], draws, score, log=log)
    assert calls == [8, 3, 3, 3, 3, 2, 2, 2, 2]
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-2]) + '{"source": "cut sho', encoding="utf-8")
    assert len(read_log(log)) == 7
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")))
    assert compare(original, ["random", "facility"], [3, 2], draws, score, log=log)[:7] == cells[:7]
    assert len(calls) == 11
    assert len(compare(original, ["facility"], [3], draws, score, budget=-1.0)) == 0


def test_table_by_hand() -> None:
    def cell(experts: int, name: str, draw: int, score: float | None) -> Cell:
        return Cell("s", experts, name, draw, "c", score, 0.0, refused="" if score is not None else "too few")

    cells = [cell(0, "original", 0, 0.9)]
    cells += [cell(8, "random", 0, 0.1), cell(8, "random", 1, 0.3), cell(8, "swap", 0, 0.5), cell(8, "swap", 1, 0.6)]
    cells += [cell(4, "swap", 0, None)]
    rows = table(cells)
    assert [(row.experts, row.strategy) for row in rows] == [(8, "swap"), (8, "random"), (4, "swap")]
    assert rows[0].mean == pytest.approx(0.55)
    assert rows[0].spread == pytest.approx(0.05 * math.sqrt(2))
    assert rows[0].above == pytest.approx((0.55 - 0.2) / (0.9 - 0.2))
    assert rows[1].above == pytest.approx(0.0)
    assert rows[2].refused == "too few"
