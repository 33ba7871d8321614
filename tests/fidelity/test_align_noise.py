import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from harness.fidelity.align import ArmSet, difference_before_onset, missing, never_fired, observed, stack
from harness.fidelity.metrics import DEFAULT, METRICS
from harness.fidelity.noise import independent, inside_margin, interval, noise_of, scale_of, struck
from harness.trace import Trace
from tests.fidelity.synthetic import ONSET, build

quick = settings(max_examples=40, deadline=None, derandomize=True)


def change(arms, condition, seed, step, metric, value):
    """Return the arms with one value replaced (None: missing)."""
    trace = getattr(arms, condition)[seed]
    columns = {m: trace.column(m) for m in trace.metrics}
    columns[metric][trace.steps.index(step)] = value
    return replace(arms, condition, seed, Trace.from_columns(trace.steps, columns))


def replace(arms, condition, seed, trace):
    parts = {c: dict(getattr(arms, c)) for c in ("clean", "faulted", "null")}
    parts[condition][seed] = trace
    return ArmSet(**parts, fired=arms.fired)


def test_primary_metrics_and_what_replay_cannot_show():
    assert [m for m, spec in METRICS.items() if spec.primary] == ["loss", "grad_norm", "entropy"]
    assert [m for m, spec in METRICS.items() if not spec.observable("replay")] == ["reward", "response_length"]
    assert all(spec.observable("free") for spec in METRICS.values())
    arms = build(0)
    assert "reward" not in observed(arms, arms, "replay")
    assert "reward" in observed(arms, arms, "free")


def test_stack_starts_at_onset():
    arms = build(0, seeds=2)
    assert stack(arms.clean, (0, 1), "loss", ONSET).tolist() == [arms.clean[s].column("loss")[ONSET:] for s in (0, 1)]


@pytest.mark.parametrize("condition", ["faulted", "null"])
def test_a_difference_before_onset_is_found_to_the_last_bit(condition):
    arms = build(0)
    assert difference_before_onset("proxy", arms, ONSET) is None
    old = arms.clean[1].column("entropy")[5]
    found = difference_before_onset("proxy", change(arms, condition, 1, 5, "entropy", math.nextafter(old, 9)), ONSET)
    assert found is not None
    assert f"the {condition} arm of the proxy, seed 1" in found
    assert f"entropy at step 5 is {math.nextafter(old, 9)}, not {old}" in found


def test_minus_zero_is_a_difference_and_nan_in_both_is_not():
    arms = change(change(build(0), "clean", 0, 2, "loss", 0.0), "null", 0, 2, "loss", 0.0)
    assert "loss at step 2 is -0.0, not 0.0" in difference_before_onset(
        "original", change(arms, "faulted", 0, 2, "loss", -0.0), ONSET
    )
    for condition in ("clean", "faulted", "null"):
        arms = change(arms, condition, 0, 2, "loss", math.nan)
    assert difference_before_onset("original", arms, ONSET) is None


def test_never_fired_names_model_and_seeds():
    arms = build(0)
    assert never_fired("proxy", arms) is None
    idle = ArmSet(arms.clean, arms.faulted, arms.null, fired={0: 3, 1: 0})
    assert never_fired("proxy", idle) == "the proxy (seed 1, 2)"


def test_missing_data_are_named():
    a, b = build(0), build(1)
    assert missing(a, b, "replay", ONSET, DEFAULT) is None
    short = replace(b, "null", 2, b.null[2][:-1])
    assert (
        missing(a, short, "replay", ONSET, DEFAULT)
        == "the null arm of the proxy, seed 2, has 23 steps (0 to 22), the others have 24 steps (0 to 23)"
    )
    empty = replace(b, "faulted", 0, Trace())
    assert "faulted arm of the proxy, seed 0, has no steps" in missing(a, empty, "replay", ONSET, DEFAULT)
    hole = change(a, "faulted", 1, 9, "kl", None)
    assert missing(hole, b, "replay", ONSET, DEFAULT) == (
        "kl is missing in the faulted arm of the original, seed 1: 1 of 24 steps, the first of them step 9"
    )
    few = build(0, seeds=2)
    assert missing(few, few, "replay", ONSET, DEFAULT) == "the original has 2 seeds, fewer than the 3 needed"
    lost = ArmSet(a.clean, {0: a.faulted[0], 1: a.faulted[1]}, a.null, a.fired)
    assert missing(lost, b, "replay", ONSET, DEFAULT) == "the faulted arm of the original is missing for seed 2"
    assert missing(a, b, "replay", 22, DEFAULT) == ("2 steps from the onset at step 22 on are fewer than the 4 needed")
    bare = build(1, metrics={"loss": 1.0, "grad_norm": 1.0})
    assert "entropy is missing in the clean arm of the proxy" in missing(a, bare, "replay", ONSET, DEFAULT)
    nothing = ArmSet({}, {}, {}, {})
    assert missing(nothing, nothing, "free", 0, DEFAULT) == "the original has 0 seeds, fewer than the 3 needed"


def test_difference_scale_is_the_step_to_step_spread():
    rng = np.random.default_rng(0)
    clean = 5.0 + 0.3 * rng.normal(size=(3, 20_000)) + np.linspace(0, 50, 20_000)
    scale = scale_of(clean, log=False)
    assert scale.unit == pytest.approx(0.3, rel=0.02)  # the trend of 50 does not count
    assert scale.response(clean + 0.6, clean) == pytest.approx(np.full(clean.shape, math.asinh(2.0)), rel=0.02)
    assert scale.size(math.asinh(2.0)) == pytest.approx(2.0)
    assert scale.unsize(2.0) == pytest.approx(math.asinh(2.0))
    assert scale.response(clean + 3000, clean) == pytest.approx(np.full(clean.shape, math.log(2e4)), rel=0.01)


def test_log_scale_is_a_ratio_that_survives_zero():
    clean = np.full((3, 6), 0.02)
    scale = scale_of(clean, log=True)
    assert scale.response(1.5 * clean, clean) == pytest.approx(np.full(clean.shape, math.log(1.5)), rel=1e-3)
    assert scale.response(0 * clean, clean) == pytest.approx(np.full(clean.shape, math.log(1e-4)), rel=1e-3)
    assert scale.response(1e9 * clean, clean).max() == scale.limit == pytest.approx(math.log(1e4))
    residue = scale_of(np.full((3, 6), 1e-7), log=True, residue=1e-5)
    assert abs(residue.response(np.full((3, 6), 3e-7), np.full((3, 6), 1e-7))).max() < DEFAULT.margin_log


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("level", [0.0, 3.0])
def test_a_constant_metric_is_handled_not_divided_by(log, level):
    clean = np.full((3, 6), level)
    scale = scale_of(clean, log)
    assert scale.unit > 0
    assert (scale.response(clean, clean) == 0).all()
    noise = noise_of(scale.response(clean, clean), "replay", scale.resolution(2.0**-23))
    assert (noise.spread > 0).all()
    assert (noise.level > 0).all()


@quick
@given(st.floats(1e-6, 1e6), st.floats(-1e3, 1e3), st.integers(0, 5))
def test_responses_do_not_depend_on_unit_or_level(factor, offset, key):
    rng = np.random.default_rng(key)
    clean = rng.lognormal(size=(3, 12))
    faulted = clean * rng.lognormal(size=(3, 12))
    ratio = scale_of(clean, True).response(faulted, clean)
    assert scale_of(factor * clean, True).response(factor * faulted, factor * clean) == pytest.approx(ratio, abs=1e-9)
    units = scale_of(clean, False).response(faulted, clean)
    moved, moved_clean = factor * (faulted + offset), factor * (clean + offset)
    assert scale_of(moved_clean, False).response(moved, moved_clean) == pytest.approx(units, abs=1e-6)


def test_replay_noise_is_a_growing_envelope():
    null = np.array([[0.0, 2e-3, 1e-3, -4e-3], [0.0, -1e-3, 0.0, 1e-3], [1e-9, 0.0, 0.0, 0.0]])
    spread = noise_of(null, "replay", floor=1e-6).spread
    assert spread == pytest.approx([1e-6, 4e-3, 4e-3, 8e-3])  # largest so far, times 1 + 3/3, not below the floor
    null[1, 2] = np.nan
    assert np.isinf(noise_of(null, "replay", 1e-6).spread).tolist() == [False, False, True, True]


def test_free_noise_is_the_upper_end_of_the_rms_interval():
    null = np.random.default_rng(3).normal(size=(4, 500))
    expected = math.sqrt(np.mean(null**2) * 2000 / stats.chi2.ppf(0.05, 2000))
    assert noise_of(null, "free", 1e-6).spread == pytest.approx(np.full(500, expected), rel=2e-3)
    walk = np.cumsum(np.random.default_rng(3).normal(size=(3, 16)), axis=1)  # few independent steps: wide
    assert noise_of(walk, "free", 1e-6).spread[0] > 1.5 * math.sqrt(np.mean(walk**2))


def test_independent_steps_of_a_first_order_process():
    rng, rho = np.random.default_rng(0), 0.6
    x = np.zeros((4, 50_000))
    for t in range(1, x.shape[1]):
        x[:, t] = rho * x[:, t - 1] + rng.normal(size=4)
    assert independent(x) == pytest.approx(50_000 * (1 - rho) / (1 + rho), rel=0.05)
    assert independent(np.zeros((3, 8))) == 8


def test_interval_is_scipys_t_interval():
    r = np.random.default_rng(1).normal(size=(5, 8))
    low, high = interval(r)
    for i, window in enumerate((slice(0, 8), slice(4, 8))):
        means = r[:, window].mean(axis=1)
        expected = stats.t.interval(0.90, 4, loc=means.mean(), scale=stats.sem(means))
        assert (low[i], high[i]) == pytest.approx(expected)


def test_inside_margin_needs_the_whole_interval():
    flat = np.zeros((3, 8))
    assert inside_margin(flat, 0.02)
    late = flat.copy()
    late[:, 6:] = 0.05  # small on the whole, too much in the later half
    assert not inside_margin(late, 0.02)
    assert not inside_margin(np.array([[0.05] * 8, [-0.05] * 8, [0.0] * 8]), 0.02)  # mean 0, but not shown
    late[0, 0] = np.nan
    assert not inside_margin(late, 100.0)


def test_struck_needs_finite_twins():
    bad = np.array([[np.nan, np.inf, np.nan, np.nan, 1.0]])
    clean = np.array([[1.0, 1.0, np.nan, 1.0, np.nan]])
    null = np.array([[1.0, 1.0, 1.0, np.inf, 1.0]])
    assert struck(bad, clean, null).tolist() == [[True, True, False, False, False]]
