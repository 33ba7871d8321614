from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from proxies.checkpoint import CheckpointError
from proxies.profile import LayerProfile, Profile
from proxies.select import facility, kmedoids, needs_outputs, searches, select, strategies
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
        **random_outputs(rng, experts),
    )


def random_outputs(
    rng: np.random.Generator, experts: int, tokens: int = 20, sketch: int = 3
) -> dict[str, torch.Tensor]:
    """Outputs of `experts` experts on a token sample, of which two are chosen per token by softmax."""
    logits = rng.normal(size=(tokens, experts))
    scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    outputs = rng.normal(size=(tokens, experts, sketch))
    values = {
        "mean_output": outputs.mean(0),
        "output_norm": np.linalg.norm(outputs, axis=2).mean(0),
        "choice_bias": np.zeros(experts),
        "sample_logits": logits,
        "sample_scores": scores,
        "sample_mass": np.ones(tokens),
        "sample_outputs": outputs,
        "sample_target": routed(scores, outputs, range(experts)),
    }
    return {name: torch.tensor(v, dtype=torch.float32) for name, v in values.items()}


def routed(scores: np.ndarray, outputs: np.ndarray, kept: Iterable[int], top_k: int = 2) -> np.ndarray:
    """What two experts chosen among `kept` put out together, token by token."""
    result = np.zeros((len(scores), outputs.shape[2]))
    for n in range(len(scores)):
        best = sorted(kept, key=lambda e, n=n: -scores[n, e])[:top_k]
        result[n] = sum(scores[n, e] * outputs[n, e] for e in best) / sum(scores[n, e] for e in best)
    return result


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
        if searches(name):
            continue  # needs a model: see test_search.py
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
    assert select(profile_of(layer), 3, "reap")[0] == sorted(by_mean)
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


@pytest.mark.parametrize("seed", range(3))
def test_reconstruction_adds_the_expert_that_leaves_the_least_error(seed: int) -> None:
    layer = random_layer(seed)
    assert layer.sample_scores is not None
    assert layer.sample_outputs is not None
    assert layer.sample_target is not None
    scores, outputs, target = layer.sample_scores.numpy(), layer.sample_outputs.numpy(), layer.sample_target.numpy()
    kept: list[int] = []
    for _ in range(4):
        error = {
            e: float(((routed(scores, outputs, [*kept, e]) - target) ** 2).sum()) for e in range(8) if e not in kept
        }
        kept.append(min(error, key=lambda e: error[e]))
    assert select(profile_of(layer), 4, "reconstruction")[0] == sorted(kept)


def test_output_clusters_agree_with_scikit_learn_and_keep_the_most_frequent_or_the_central_member() -> None:
    from sklearn.cluster import AgglomerativeClustering

    for seed in range(4):
        layer = random_layer(seed, 12)
        assert layer.mean_output is not None
        rows = layer.mean_output.numpy()
        labels = AgglomerativeClustering(5, metric="euclidean", linkage="average").fit(rows).labels_
        clusters = [[e for e in range(12) if labels[e] == c] for c in range(5)]
        often = sorted(max(c, key=lambda e: float(layer.frequency[e])) for c in clusters)
        assert select(profile_of(layer), 5, "output_clusters")[0] == often
        central = sorted(min(c, key=lambda e, c=c: np.linalg.norm(rows[e] - rows[c].mean(0))) for c in clusters)
        found = select(profile_of(layer), 5, "output_clusters", options={"representative": "central"})[0]
        assert len(set(found) & set(central)) >= 4  # two members of a pair are equally central
        assert all(sum(e in c for e in found) == 1 for c in clusters)


def test_output_options_and_a_profile_without_outputs_are_refused() -> None:
    layer = random_layer(0)
    for name, value in {"representative": "oldest", "linkage": "chain", "metric": "miles"}.items():
        with pytest.raises(CheckpointError, match=f"{name}|{value}"):
            select(profile_of(layer), 3, "output_clusters", options={name: value})
    bare = replace(layer, **dict.fromkeys(random_outputs(np.random.default_rng(0), 8)))
    for name in strategies():
        if needs_outputs(name):
            with pytest.raises(CheckpointError, match=f"strategy {name} needs the experts' outputs"):
                select(profile_of(bare), 3, name)
    assert {name for name in strategies() if needs_outputs(name)} == {"output_clusters", "reconstruction"}


def test_groups_keep_the_same_number_each_and_are_chosen_as_layers_of_their_own() -> None:
    layer = random_layer(4, 12)
    for name in strategies():
        if searches(name):
            continue
        kept = select(profile_of(layer), 6, name, groups=3)[0]
        assert [sum(e // 4 == group for e in kept) for group in range(3)] == [2, 2, 2]
        if name in ("frequency", "facility", "output_clusters"):
            parts = [select(profile_of(layer.part(list(range(g, g + 4)))), 2, name)[0] for g in (0, 4, 8)]
            assert kept == [g * 4 + e for g, part in enumerate(parts) for e in part]
    with pytest.raises(CheckpointError, match="5 experts cannot be kept: the router's 3 groups"):
        select(profile_of(layer), 5, "first", groups=3)
    with pytest.raises(CheckpointError, match="3 experts cannot be kept: each of the router's 3 groups needs 2"):
        select(profile_of(layer), 3, "first", groups=3, group_top=2)


def test_a_search_without_a_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="strategy swap tries selections on the model"):
        select(profile_of(random_layer(0)), 3, "swap")
