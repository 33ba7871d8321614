"""The arithmetic of the calibration study, against other libraries and small cases done by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta
from sklearn.metrics import roc_auc_score

from experiments.benchmarks.fidelity import stages
from experiments.benchmarks.fidelity.bank import studied
from experiments.benchmarks.fidelity.calibrate import calibrate, settings
from experiments.benchmarks.fidelity.identify import look_alikes
from experiments.benchmarks.fidelity.matching import area, own_area, pairwise, ranks
from experiments.benchmarks.fidelity.rates import Rate
from harness.catalogue import find
from harness.fidelity.signature import Signature, similarity
from tests.fidelity.synthetic import ONSET, becomes, build, drift, shift

FAULTS = {
    "louder": {"grad_norm": shift(0.3), "loss": shift(2.0)},
    "quieter": {"grad_norm": shift(-0.3), "loss": shift(2.0)},
    "sliding": {"entropy": drift(-0.02)},
    "overflow": {"grad_norm": becomes(float("inf"))},
}


def test_the_area_is_that_of_scikit_learn() -> None:
    scores = np.round(np.random.default_rng(0).random((9, 9)), 1)  # rounded, so that there are ties
    truth = np.eye(9, dtype=bool)
    assert area(scores) == pytest.approx(roc_auc_score(truth.ravel(), scores.ravel()))
    some = ~truth & (np.arange(9)[:, None] % 2 == 0)
    used = truth | some
    assert area(scores, some) == pytest.approx(roc_auc_score(truth[used], scores[used]))


def test_the_own_area_of_a_fault_counts_its_row_and_its_column() -> None:
    scores = np.array([[0.5, 0.1, 0.9], [0.5, 0.8, 0.2], [0.4, 0.7, 0.6]])
    # fault 0: others .1 .9 .5 .4, of which two are below .5 and one ties
    assert own_area(scores).tolist() == [2.5 / 4, 1.0, 2 / 4]


def test_a_tie_for_the_first_place_is_a_loss() -> None:
    scores = np.array([[0.9, 0.9, 0.1], [0.2, 0.5, 0.1], [0.7, 0.8, 0.6]])
    assert ranks(scores).tolist() == [1, 0, 2]
    # with faults 0 and 1 in one group, any of the two is right for either
    assert ranks(scores, [0, 0, 1]).tolist() == [0, 0, 1]


def test_all_pairs_at_once_are_the_similarities_one_by_one() -> None:
    originals = {n: Signature(build(i, f), "replay", ONSET) for i, (n, f) in enumerate(FAULTS.items())}
    proxies = {n: Signature(build(9 + i, f, scale=2.0), "replay", ONSET) for i, (n, f) in enumerate(FAULTS.items())}
    expected = [[similarity(o, p) for p in proxies.values()] for o in originals.values()]
    found = pairwise(originals, proxies)
    np.testing.assert_allclose(found.scores(), expected, atol=1e-12)
    assert calibrate(found).provisional == pytest.approx(own_area(np.array(expected)).mean())


def test_the_weights_that_are_tried_sum_to_one_and_include_those_in_use() -> None:
    tried = [(t.onset_weight, t.size_weight, t.shape_weight) for t in settings()]
    assert np.allclose([sum(t) for t in tried], 1.0)
    assert any(t == pytest.approx((0.25, 0.4, 0.35)) for t in tried)


def test_look_alikes_are_grouped_nearest_first_and_four_at_most() -> None:
    place = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 9.0])
    distances = 1 + np.abs(place[:, None] - place[None, :])
    groups = look_alikes(distances, tuple("abcdef"))
    assert sorted(len(g) for g in groups) in ([1, 1, 4], [1, 2, 3])
    assert ("f",) in groups
    assert sorted(name for g in groups for name in g) == list("abcdef")


def test_a_rate_says_its_exact_interval() -> None:
    # no event in n draws: the upper 95% bound is 1 - 0.05^(1/n), about 3/n
    assert f"upper 95% bound {1 - 0.05 ** (1 / 400):.1%}" in str(Rate(0, 400))
    low, high = beta.ppf(0.025, 3, 8), beta.ppf(0.975, 4, 7)
    assert f"[{low:.1%}, {high:.1%}]" in str(Rate(3, 10))


def test_the_study_names_faults_that_exist_and_can_be_set() -> None:
    known = {f.name for f in studied()}
    assert {*stages.SAMPLE, *stages.COVERAGE, *stages.SEVERITIES} <= known
    for name, values in stages.SEVERITIES.items():
        fault = find(name)
        assert list(values) == sorted(values)
        for value in values:
            assert fault.ref({str(fault.severity): value}).options
