"""Greedy reconstruction: the experts whose joint output comes closest to the whole layer's."""

from __future__ import annotations

from proxies.profile import LayerProfile
from proxies.select import needed

NEEDS_OUTPUTS = True


def select(layer: LayerProfile, keep: int, *, seed: int, layer_index: int) -> list[int]:
    """Add experts one by one, each the one that lowers the squared error of the layer's output most.

    The error is taken on the profile's token sample, in its random projection. Tokens may be routed to kept experts
    only; routing weights share the original's total among the chosen ones in proportion to the router's scores.
    With fewer kept than are chosen per token all kept ones count.
    """
    import torch

    outputs, scores = needed(layer.sample_outputs, "reconstruction"), needed(layer.sample_scores, "reconstruction")
    mass, target = needed(layer.sample_mass, "reconstruction"), needed(layer.sample_target, "reconstruction")
    choice = scores + needed(layer.choice_bias, "reconstruction").float()
    top_k = _top_k(layer)
    tokens, experts, size = outputs.shape
    by_expert = outputs.transpose(0, 1).contiguous()  # [E, N, S]
    inside = torch.full((tokens, top_k), -1)  # chosen among the kept ones, by token
    kept: list[int] = []
    for _ in range(keep):
        free = inside < 0
        known = inside.clamp(min=0)
        weight = scores.gather(1, known).masked_fill(free, 0.0)
        total = torch.einsum("nk,nks->ns", weight, outputs.gather(1, known[:, :, None].expand(-1, -1, size)))
        ranks = choice.gather(1, known).masked_fill(free, -torch.inf)
        place = ranks.argmin(1)
        leaving, bar = inside.gather(1, place[:, None])[:, 0], ranks.gather(1, place[:, None])[:, 0]
        lost = weight.gather(1, place[:, None])[:, 0]
        without = total - lost[:, None] * outputs[torch.arange(tokens), leaving.clamp(min=0)]
        norm = weight.sum(1)
        error = torch.full((experts,), torch.inf)
        for e in range(experts):
            if e in kept:
                continue
            enters = choice[:, e] > bar
            after = torch.where(enters[:, None], without + scores[:, e, None] * by_expert[e], total)
            share = torch.where(enters, norm - lost + scores[:, e], norm).clamp(min=1e-30)
            error[e] = (after * (mass / share)[:, None] - target).square().sum()
        best = int(error.argmin())
        kept.append(best)
        enters = choice[:, best] > bar
        inside[enters, place[enters]] = best
    return kept


def _top_k(layer: LayerProfile) -> int:
    """Experts chosen per token: one with k choices adds k to the frequencies and k squared to the pairs."""
    return max(1, round(float(layer.coactivation.sum() / layer.frequency.sum())))
