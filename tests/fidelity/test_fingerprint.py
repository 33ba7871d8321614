import numpy as np
import pytest

from harness.fidelity.fingerprint import FEATURES, Ruler, fingerprint
from harness.fidelity.metrics import METRICS
from harness.fidelity.signature import Signature
from tests.fidelity.synthetic import LEVELS, ONSET, STEPS, becomes, build, shift

NAMES = list(METRICS)


def point(key, responses, **options):
    options.setdefault("spread", 1e-9)  # a flat clean course: the response is what was asked for
    return fingerprint(Signature(build(key, responses, **options), "replay", ONSET))


def of(found, metric):
    at = NAMES.index(metric) * FEATURES
    return found[at : at + FEATURES]


def test_the_features_of_a_shift_are_its_decades_and_its_signed_size():
    late = of(point(1, {"grad_norm": shift(-0.3, 2)}), "grad_norm")
    # two untouched steps, then five stretches of |-0.3|; a log scale's eps is 1e-4 of the level
    response = np.log((np.exp(-0.3) + 1e-4) / (1 + 1e-4))
    assert late[:2] == pytest.approx([-5, -5], abs=0.01)
    assert late[2:5] == pytest.approx(np.full(3, np.log10(-response + 1e-5)), abs=1e-4)
    assert late[5:7] == pytest.approx([0, 0], abs=1e-4)
    assert late[7:9] == pytest.approx(np.full(2, np.arcsinh(response / 0.02)), abs=1e-3)
    # fourteen of the sixteen steps from onset on
    assert late[9] == pytest.approx(np.arcsinh(response * (STEPS - ONSET - 2) / (STEPS - ONSET) / 0.2), abs=1e-3)


def test_metrics_that_were_not_recorded_are_unknown_and_not_zero():
    found = point(1, {})
    for metric in NAMES:
        if metric == "reward":  # recorded, but it cannot respond in replay
            assert np.isnan(of(found, metric)).all()
        else:
            assert np.isfinite(of(found, metric)).all() == (metric in LEVELS)


def test_responses_far_beyond_the_limit_of_the_score_keep_their_size():
    sizes = [of(point(1, {"kl": shift(size)}), "kl")[4] for size in (10.0, 20.0)]
    assert sizes == pytest.approx([1.0, np.log10(20)], abs=1e-3)


def test_a_non_finite_value_is_a_feature():
    found = of(point(1, {"grad_norm": becomes(float("nan"), at=8)}), "grad_norm")
    assert found[10] == 3.0 * 0.5


def test_a_ruler_is_the_spread_of_twins_under_one_fault():
    a, b = np.array([1.0, 5.0, np.nan]), np.array([3.0, 5.0, np.nan])
    c, d = np.array([0.0, 1.0, 2.0]), np.array([0.0, 5.0, 2.0])
    ruler = Ruler.fit([(a, b), (c, d)])
    # half the mean square distance, by hand: (4 + 0) / 2 / 2, (0 + 16) / 2 / 2, 0; plus 5% of the median of 1 and 4
    assert ruler.spread**2 == pytest.approx([1.125, 4.125, 0.125])
    assert ruler.distance(a, b) == pytest.approx((2 / np.sqrt(1.125) + 0) / 2)
    assert ruler.distance(np.array([1.0, np.nan, np.nan]), np.array([np.nan, 1.0, 1.0])) == np.inf


def test_one_pair_is_not_enough():
    with pytest.raises(ValueError, match="at least two faults, seen in both models, not 1"):
        Ruler.fit([(np.zeros(2), np.zeros(2))])


def test_small_faults_are_told_apart_by_the_metrics_that_they_leave_alone():
    faults = {
        "head": {"kl": shift(1e-3), "grad_norm": shift(1e-3)},
        "router": {"kl": shift(1e-3), "update_norm": shift(1e-3)},
        "both": {"kl": shift(1e-3), "grad_norm": shift(1e-3), "update_norm": shift(1e-3)},
    }
    first = {n: point((1, i), f) for i, (n, f) in enumerate(faults.items())}
    second = {n: point((2, i), f, scale=3.0) for i, (n, f) in enumerate(faults.items())}
    ruler = Ruler.fit([(first[n], second[n]) for n in faults])
    for name, found in first.items():
        assert ruler.rank(found, second)[0][0] == name
