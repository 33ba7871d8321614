import pytest

from harness.fidelity.signature import Signature, agreement, nearest, similarity
from tests.fidelity.synthetic import ONSET, becomes, build, drift, shift, spike
from tests.fidelity.test_verdict import FAULT, judge

FAULTS = {
    "louder": {"grad_norm": shift(0.3), "loss": shift(2.0)},
    "quieter": {"grad_norm": shift(-0.3), "loss": shift(2.0)},
    "later": {"grad_norm": shift(0.3, 8), "loss": shift(2.0, 8)},
    "sliding": {"entropy": drift(-0.02)},
    "overflow": {"grad_norm": becomes(float("inf"))},
    "spike": {"grad_norm": spike(2.0)},
}


def signature(key, fault):
    return Signature(build(key, fault), "replay", ONSET)


@pytest.mark.parametrize("name", FAULTS)
def test_similarity_is_the_fidelity_of_a_comparison(name):
    for other in FAULTS.values():
        report = judge(build(1, FAULTS[name]), build(2, other))
        expected = 0.0 if report.overall is None else report.overall
        assert similarity(signature(1, FAULTS[name]), signature(2, other)) == expected


def test_the_nearest_known_response_is_that_of_the_same_fault():
    known = {name: signature((2, i), fault) for i, (name, fault) in enumerate(FAULTS.items())}
    for i, (name, fault) in enumerate(FAULTS.items()):
        ranked = nearest(signature((1, i), fault), known)
        assert ranked[0][0] == name
        assert [s for _, s in ranked] == sorted((s for _, s in ranked), reverse=True)


def test_a_healthy_run_is_near_to_nothing():
    healthy = signature(1, {})
    assert not healthy.responds()
    assert signature(1, FAULT).responds()
    assert {s for _, s in nearest(healthy, {"healthy": signature(2, {})})} == {0.0}


def test_only_metrics_that_both_recorded_are_compared():
    few = Signature(build(2, FAULT, metrics={"loss": 0.02, "kl": 0.01}), "replay", ONSET)
    assert agreement(signature(1, FAULT), few).metrics == ("loss", "kl")
    assert agreement(signature(1, FAULT), few, ["kl"]).metrics == ("kl",)
