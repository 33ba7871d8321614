import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.claims import Claim, Falls, Flat, NonFinite, Rises, Scatters, Shifts, Spikes, Stays, Zero
from harness.fidelity import Symptom, holds
from harness.fidelity.align import stack
from harness.fidelity.evidence import gather, pooled
from harness.fidelity.metrics import DEFAULT, METRICS
from harness.fidelity.symptoms import change_points, describe, summary
from tests.fidelity.synthetic import ONSET, STEPS, becomes, build, drift, scatter, shift, spike

quick = settings(max_examples=60, deadline=None, derandomize=True)
AFTER = tuple(range(ONSET, STEPS))


def symptom(metric, response, mode="replay", **options):
    arms = build(options.pop("key", 4), {metric: response}, mode=mode, **options)
    values = [stack(part, arms.seeds, metric, ONSET) for part in (arms.clean, arms.faulted, arms.null)]
    e = gather(METRICS[metric], *values, METRICS[metric].positive, mode, 2.0**-23, DEFAULT)
    return summary(e, describe(e, np.arange(len(arms.seeds))[None], DEFAULT), AFTER, DEFAULT)


@pytest.mark.parametrize("at", [0, 1, 7, 12])
@pytest.mark.parametrize("sign", [-1, 1])
def test_level_shift_is_found_at_its_very_step(at, sign):
    s = symptom("grad_norm", shift(sign * 0.3, at))
    assert (s.kind, s.sign, s.onset) == ("level_shift", sign, ONSET + at)
    assert s.size == pytest.approx(sign * 0.3, rel=1e-3)
    assert s.confidence == 1.0
    assert s.null_units > 1000


def test_level_shift_of_a_difference_metric_is_in_clean_spreads():
    s = symptom("loss", shift(-2.0))
    assert (s.kind, s.sign) == ("level_shift", -1)
    assert s.size == pytest.approx(-2.0, rel=0.5)  # 24 steps estimate the spread that roughly
    same = symptom("loss", shift(-2.0), scale=1e5)
    assert same.size == pytest.approx(s.size, rel=1e-6)


@pytest.mark.parametrize("at", [0, 4, 8])
def test_drift_is_found_at_its_very_step(at):
    s = symptom("entropy", drift(-0.02, at))
    assert (s.kind, s.sign, s.onset) == ("drift", -1, ONSET + at)
    last = [max(t - at + 1, 0) * -0.02 for t in range(11, 16)]
    assert s.size == pytest.approx(np.mean(last), rel=1e-3)  # the mean of the last third


@pytest.mark.parametrize("at", [0, 3, 14])
@pytest.mark.parametrize("sign", [-1, 1])
def test_an_isolated_spike(at, sign):
    s = symptom("grad_norm", spike(sign * 2.0, at))
    assert (s.kind, s.sign, s.onset) == ("spike", sign, ONSET + at)
    assert s.size == pytest.approx(sign * 2.0, rel=1e-3)


def test_a_spike_in_the_last_step_could_be_a_shift_and_is_called_one():
    assert symptom("grad_norm", spike(2.0, 15)).kind == "level_shift"


@pytest.mark.parametrize(
    ("value", "which", "sign"), [(math.nan, "nan", 0), (math.inf, "inf", 1), (-math.inf, "-inf", -1)]
)
def test_non_finite_says_which(value, which, sign):
    s = symptom("loss", becomes(value, at=5))
    assert (s.kind, s.which, s.sign, s.onset) == ("nonfinite", which, sign, ONSET + 5)
    assert str(s.size) == which
    assert s.to_dict()["size"] == which
    assert s.to_dict()["null_units"] == "inf"


def test_frozen_at_zero_and_at_another_value():
    s = symptom("update_norm", becomes(0.0, at=2))
    assert (s.kind, s.which, s.sign, s.onset) == ("frozen", "zero", -1, ONSET + 2)
    s = symptom("update_norm", becomes(0.03, at=2))
    assert (s.kind, s.which, s.sign, s.onset) == ("frozen", "constant", 1, ONSET + 2)


def test_a_metric_that_is_constant_in_healthy_runs_too_is_not_frozen():
    flat = np.full((3, 16), 0.5)
    e = gather(METRICS["grad_norm"], flat, flat, flat, True, "replay", 2.0**-23, DEFAULT)
    assert summary(e, describe(e, np.arange(3)[None], DEFAULT), AFTER, DEFAULT).kind == "none"
    zero = np.zeros((3, 16))  # as skipped_steps, which then becomes 4 in every step
    e = gather(METRICS["skipped_steps"], zero, zero + 4, zero, False, "replay", 2.0**-23, DEFAULT)
    s = summary(e, describe(e, np.arange(3)[None], DEFAULT), AFTER, DEFAULT)
    assert (s.kind, s.sign, s.onset) == ("level_shift", 1, ONSET)
    assert s.size == pytest.approx(4.0)


def test_seeds_that_scatter_in_both_directions_are_a_spread_change():
    s = symptom("loss", scatter(3.0))
    assert (s.kind, s.sign, s.onset) == ("spread_change", 1, ONSET)
    assert s.size == pytest.approx(3.0, rel=0.5)


def test_none_says_whether_it_was_shown():
    s = symptom("grad_norm", shift(0.0))
    assert (s.kind, s.sign, s.onset, s.size, s.confidence) == ("none", 0, None, 0.0, 1.0)
    assert symptom("grad_norm", shift(0.0), mode="free").confidence == 0.0
    small = symptom("grad_norm", shift(0.015))  # far outside the null spread, but inside the margin of 2%
    assert (small.kind, small.confidence) == ("none", 1.0)
    assert small.null_units > 1000


def test_free_mode_sees_a_shift_of_a_few_spreads_through_sampling_noise():
    s = symptom("grad_norm", shift(0.4), mode="free")
    assert (s.kind, s.sign) == ("level_shift", 1)
    assert abs(s.onset - ONSET) <= 1
    assert s.size == pytest.approx(0.4, abs=0.1)


def test_a_null_arm_that_diverges_as_far_hides_the_response():
    assert symptom("grad_norm", shift(0.05), null=1e-6).kind == "level_shift"
    assert symptom("grad_norm", shift(0.05), null=0.5).kind == "none"


def naive_change_points(r):
    best = {}
    for name in ("level", "ramp"):
        for k in range(len(r)):
            m = len(r) - k
            basis = np.zeros(len(r))
            basis[k:] = 1.0 if name == "level" else np.arange(1, m + 1)
            beta = basis @ r / (basis @ basis)
            cost = np.sum((r - beta * basis) ** 2)
            if name not in best or cost < best[name][1] - 1e-12:
                best[name] = (k, cost)
    return best


@quick
@given(st.lists(st.integers(-50, 50), min_size=1, max_size=25).filter(any))
def test_change_points_agree_with_brute_force(values):
    r = np.array(values, dtype=float)
    k, gain, j, ramp_gain = (x[0] for x in change_points(r[None]))
    best = naive_change_points(r)
    total = np.sum(r**2)
    assert total - gain == pytest.approx(best["level"][1], abs=1e-6)
    assert total - ramp_gain == pytest.approx(best["ramp"][1], abs=1e-6)
    # the reported step attains that cost
    level = np.where(np.arange(len(r)) >= k, r[k:].mean(), 0)
    assert np.sum((r - level) ** 2) == pytest.approx(best["level"][1], abs=1e-6)
    basis = np.maximum(np.arange(len(r)) - j + 1, 0)
    assert np.sum((r - basis @ r / (basis @ basis) * basis) ** 2) == pytest.approx(best["ramp"][1], abs=1e-6)


@quick
@given(st.sampled_from([shift(0.3, 2), drift(0.03), spike(2.0), scatter(0.2)]), st.floats(1e-4, 1e4))
def test_symptoms_do_not_depend_on_the_unit(response, factor):
    a, b = symptom("grad_norm", response), symptom("grad_norm", response, scale=factor)
    assert (a.kind, a.sign, a.onset) == (b.kind, b.sign, b.onset)
    assert b.size == pytest.approx(a.size, rel=1e-6)


def test_resamples_are_described_as_if_alone():
    arms = build(4, {"grad_norm": lambda t, rng: 0.3 + 0.2 * rng.normal(size=len(t))})
    values = [stack(part, arms.seeds, "grad_norm", ONSET) for part in (arms.clean, arms.faulted, arms.null)]
    e = gather(METRICS["grad_norm"], *values, True, "replay", 2.0**-23, DEFAULT)
    draws = np.array([[0, 0, 1], [2, 2, 2], [0, 1, 2]])
    together = describe(e, draws, DEFAULT)
    for i, draw in enumerate(draws):
        alone = describe(e, draw[None], DEFAULT)
        for name in together.__dataclass_fields__:
            assert (getattr(together, name)[i] == getattr(alone, name)[0]).all()


def test_pooling_keeps_short_evidence_and_averages_long():
    arms = build(4, {"grad_norm": becomes(math.inf, at=5)})
    values = [stack(part, arms.seeds, "grad_norm", ONSET) for part in (arms.clean, arms.faulted, arms.null)]
    e = gather(METRICS["grad_norm"], *values, True, "replay", 2.0**-23, DEFAULT)
    assert pooled(e, 16) is e
    half = pooled(e, 8)
    assert half.response.shape == (3, 8)
    assert half.response[0, 0] == pytest.approx(e.response[0, :2].mean())
    assert (half.struck[0] > 0).tolist() == [False, False, True, True, True, True, True, True]


def made(kind, sign=0, which=None, gain=(0.0, 0.0)):
    return Symptom(kind, sign, None if kind == "none" else 8, sign * 0.3, 0.01, 1.0, which, gain)


@pytest.mark.parametrize(
    ("claim", "holding", "failing"),
    [
        (Falls("kl"), made("drift", -1), made("drift", 1)),
        (Falls("kl"), made("nonfinite", -1, "-inf"), made("spike", -1)),
        (Rises("kl"), made("level_shift", 1), made("spread_change", 1)),
        (Rises("kl"), made("nonfinite", 1, "inf"), made("nonfinite", 0, "nan")),
        (NonFinite("kl"), made("nonfinite", 0, "nan"), made("level_shift", 1)),
        (Zero("kl"), made("frozen", -1, "zero"), made("frozen", -1, "constant")),
        (Stays("kl"), made("none"), made("spread_change")),
        (Shifts("kl"), made("level_shift", -1), made("none")),
        (Spikes("kl"), made("spike", 1), made("level_shift", 1)),
        (Scatters("kl"), made("spread_change", 0), made("level_shift", 1)),
        (Flat("kl"), made("frozen", 0, "constant"), made("none", gain=(0.5, 0.4))),
        (Flat("reward"), made("drift", -1, gain=(3.0, 0.2)), made("none", gain=(0.1, 0.0))),
    ],
)
def test_claims_hold_or_not(claim, holding, failing):
    assert holds(claim, holding)
    assert not holds(claim, failing)


def test_an_unknown_claim_is_an_error():
    class Wobbles(Claim):
        pass

    with pytest.raises(TypeError, match="no rule"):
        holds(Wobbles("kl"), made("none"))
