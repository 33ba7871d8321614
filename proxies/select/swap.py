"""Whole-model search: exchanges of single experts that lower the divergence from the original on calibration text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxies import select as selection

if TYPE_CHECKING:
    from proxies.search import SearchContext


def search(
    context: SearchContext,
    keep: int,
    *,
    seed: int,
    starts: str = "facility,saliency,random",
    evaluations: int = 300,
    tries: int = 16,
    tokens: int = 2048,
) -> dict[int, list[int]]:
    """Start from the best of some strategies, then exchange experts as long as the divergence falls.

    Each round ranks all exchanges of all layers by their first-order effect on the divergence and tries the most
    promising ones in turn, keeping each that lowers the measured divergence. It ends when a round of four times as
    many tries brought nothing, or the evaluations are used up. Labels are never looked at.

    Args:
        context: profile and whole model.
        keep: experts per layer.
        seed: for starts that draw.
        starts: strategies to start from, separated by commas.
        evaluations: most divergences to measure, those of the starts included.
        tries: exchanges to try per round.
        tokens: calibration tokens that exchanges are ranked on.
    """
    candidates = [
        selection.select(context.profile, keep, name.strip(), seed=seed, groups=context.groups)
        for name in starts.split(",")
    ]
    measured = [context.parts(candidate) for candidate in candidates]
    best, kept = min(zip(measured, candidates, strict=True), key=lambda pair: sum(pair[0]))
    width = tries
    while context.evaluations < evaluations:
        improved = False
        for layer, out, into in _ranked(context, kept, tokens)[:width]:
            if context.evaluations >= evaluations:
                break
            if out not in kept[layer] or into in kept[layer]:
                continue  # an exchange of this round has taken its place
            trial = {**kept, layer: sorted({*kept[layer], into} - {out})}
            parts = context.lowers(trial, best)
            if parts is not None:
                best, kept, improved = parts, trial, True
        if not improved and width > tries:
            break
        width = tries if improved else 4 * tries
    return kept


def _ranked(context: SearchContext, kept: dict[int, list[int]], tokens: int) -> list[tuple[int, int, int]]:
    """All exchanges (layer, out, in) within a group, the most promising first."""
    found = []
    for layer, estimates in context.exchange_estimates(kept, tokens=tokens).items():
        size = estimates.shape[1] // context.groups
        for position, out in enumerate(kept[layer]):
            for into, estimate in enumerate(estimates[position].tolist()):
                if into not in kept[layer] and into // size == out // size:
                    found.append((estimate, layer, out, into))
    return [(layer, out, into) for _, layer, out, into in sorted(found)]
