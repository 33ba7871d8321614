from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from proxies.checkpoint import CheckpointError
from proxies.profile import LayerProfile, Profile
from proxies.select import facility, kmedoids, select, strategies
from proxies.views import coactivation_view, cosine_distance, fused, normalised


def random_layer(seed: int, experts: int = 8) -> LayerProfile:
    rng = np.random.default_rng(seed)
    chosen = rng.random((200, experts)).argsort(1)[:, :2]
    hits = np.zeros((200, experts))
    np.put_along_axis(hits, chosen, 1.0, 1)
    return LayerProfile(
        router=torch.tensor(rng.normal(size=(experts, 5))),
        frequency=torch.tensor(hits.sum(0)),
        weight=torch.tensor(hits.sum(0) / 2),
        coactivation=torch.tensor(hits.T @ hits),
        context=torch.tensor(rng.normal(size=(experts, 5))),
        saliency=torch.tensor(rng.gamma(1.0, size=experts)),
    )


def profile_of(layer: LayerProfile) -> Profile:
    return Profile({0: layer, 3: layer}, 200, "digest")


def brute_cost(distance: torch.Tensor, demand: torch.Tensor, kept: tuple[int, ...]) -> float:
    return sum(float(demand[e]) * min(float(distance[e, k]) for k in kept) for e in range(len(demand)))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_facility_finds_the_optimum_of_small_cases_or_a_local_one_within_the_bound(seed: int, keep: int) -> None:
    layer = random_layer(seed)
    distance = fused(layer)
    kept = facility.select(layer, keep, seed=0, layer_index=0)
    costs = [brute_cost(distance, layer.saliency, c) for c in combinations(range(8), keep)]
    found = brute_cost(distance, layer.saliency, tuple(kept))
    assert found == pytest.approx(facility.cost(distance, layer.saliency, kept))
    # No single exchange lowers it, and local optima of k-median are within a factor 5 (Arya et al., 2004).
    for inside in kept:
        for outside in set(range(8)) - set(kept):
            swapped = tuple(outside if e == inside else e for e in kept)
            assert brute_cost(distance, layer.saliency, swapped) >= found * (1 - 1e-9)
    assert found <= 5 * min(costs) + 1e-12
    if keep == 1:
        assert found == pytest.approx(min(costs))


def test_kmedoids_started_in_every_cluster_finds_each_clusters_medoid() -> None:
    centres = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]], dtype=torch.float64)
    noise = torch.tensor(np.random.default_rng(0).normal(scale=0.01, size=(9, 3)))
    rows = centres.repeat_interleave(3, 0) + noise
    layer = random_layer(0, 9)
    frequency = torch.tensor([9.0, 1, 1, 1, 9, 1, 1, 1, 9], dtype=torch.float64)
    layer = LayerProfile(rows, frequency, layer.weight, layer.coactivation, rows, layer.saliency)
    kept = kmedoids.select(layer, 3, seed=0, layer_index=0, coactivation=0.0)
    distance = fused(layer, {"router": 1.0, "coactivation": 0.0, "context": 1.0})
    clusters = [range(3), range(3, 6), range(6, 9)]
    assert kept == [min(c, key=lambda e, c=c: sum(float(distance[e, o]) for o in c)) for c in clusters]


def test_every_strategy_returns_sorted_different_experts_and_is_deterministic() -> None:
    profile = profile_of(random_layer(1))
    for name in strategies():
        kept = select(profile, 3, name, seed=5)
        assert kept == select(profile, 3, name, seed=5)
        for experts in kept.values():
            assert experts == sorted(set(experts))
            assert len(experts) == 3
            assert set(experts) <= set(range(8))


def test_simple_strategies_by_hand() -> None:
    layer = random_layer(2)
    assert select(profile_of(layer), 3, "first")[0] == [0, 1, 2]
    by_frequency = sorted(range(8), key=lambda e: (-float(layer.frequency[e]), e))[:3]
    assert select(profile_of(layer), 3, "frequency")[0] == sorted(by_frequency)
    by_saliency = sorted(range(8), key=lambda e: -float(layer.saliency[e]))[:3]
    assert select(profile_of(layer), 3, "saliency")[0] == sorted(by_saliency)
    by_mean = sorted(range(8), key=lambda e: -float(layer.saliency[e] / layer.frequency[e]))[:3]
    assert select(profile_of(layer), 3, "saliency", options={"mean": True})[0] == sorted(by_mean)
    drawn = select(profile_of(layer), 3, "random", seed=1)
    assert drawn[0] != drawn[3] or drawn != select(profile_of(layer), 3, "random", seed=2)


def test_views_by_hand() -> None:
    distance = cosine_distance(torch.tensor([[1.0, 0], [0, 2.0], [3.0, 3.0], [0.0, 0.0]], dtype=torch.float64))
    assert float(distance[0, 1]) == pytest.approx(1.0)
    assert float(distance[0, 2]) == pytest.approx(1 - 0.5**0.5)
    assert float(distance[3, 0]) == pytest.approx(1.0)
    assert distance.diagonal().abs().max() == 0
    layer = random_layer(3)
    i, j = 1, 4
    either = layer.frequency[i] + layer.frequency[j] - layer.coactivation[i, j]
    assert float(coactivation_view(layer)[i, j]) == pytest.approx(float(1 - layer.coactivation[i, j] / either))
    off_diagonal = normalised(distance)[~torch.eye(4, dtype=torch.bool)]
    assert float(off_diagonal.mean()) == pytest.approx(1.0)
    one = fused(layer, {"router": 2.0, "coactivation": 0.0, "context": 0.0})
    torch.testing.assert_close(one, normalised(cosine_distance(layer.router)))


def test_unknown_strategy_and_option_are_refused_by_name() -> None:
    profile = profile_of(random_layer(0))
    with pytest.raises(CheckpointError, match="the nearest are: facility"):
        select(profile, 3, "facilities")
    with pytest.raises(CheckpointError, match="no option 'rooter'; it has: coactivation, context, router"):
        select(profile, 3, "facility", options={"rooter": 1.0})
