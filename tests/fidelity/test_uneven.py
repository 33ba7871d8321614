"""Uneven, thinned and printed traces, and what a report says about the seeds that it lacks."""

import math

import numpy as np
import pytest

from harness.claims import Rises, Spikes
from harness.fidelity import DEFAULT, ArmSet
from harness.fidelity.grid import gap, shared
from harness.fidelity.noise import noise_of, quantum_of, scale_of
from harness.fidelity.outlook import advice, attenuation, seeds_for_interval, seeds_for_margin
from harness.trace import Trace
from tests.fidelity.synthetic import LEVELS, ONSET, STEPS, build, drift, shift, spike
from tests.fidelity.test_align_noise import change
from tests.fidelity.test_verdict import FAULT, judge


def every(arms, f):
    parts = {c: {k: f(t) for k, t in getattr(arms, c).items()} for c in ("clean", "faulted", "null")}
    return ArmSet(**parts, fired=arms.fired)


def thinned(arms, by=2, first=0):
    return every(arms, lambda t: Trace([r for r in t if r.step % by == first]))


def rounded(arms, places):
    return every(arms, lambda t: Trace.from_columns(t.steps, {m: [round(v, places) for v in t.column(m)] for m in
                                                              t.metrics}))  # fmt: skip


def test_the_shared_grid_is_what_every_arm_holds():
    a, b = build(1, FAULT), change(build(2, FAULT), "null", 1, 12, "kl", None)
    short = every(b, lambda t: t[:-2])
    left, right = shared(a, short, "replay", ONSET, DEFAULT)
    wanted = tuple(s for s in range(STEPS - 2) if s != 12)
    assert {t.steps for arms in (left, right) for _, _, t in arms.arms()} == {wanted}
    assert left.clean[0].metrics == ("entropy", "grad_norm", "kl", "loss", "update_norm")  # no reward in replay
    assert left.clean[0].column("loss") == [a.clean[0].column("loss")[s] for s in wanted]
    assert gap(left, ONSET) == (11, 13)
    assert gap(left, 13) is None
    assert shared(a, every(b, lambda t: t[: ONSET + 3]), "replay", ONSET, DEFAULT) is None  # too few steps are left
    assert shared(a, build(2, FAULT, metrics={"kl": 0.01}), "replay", ONSET, DEFAULT) is None  # no primary metric


def test_another_logging_interval_is_scored_but_never_passes():
    a, b = build(1, FAULT, steps=48), build(2, FAULT, steps=48)
    report = judge(a, thinned(b))
    assert report.verdict == "INCONCLUSIVE"
    assert (
        "the clean arm of the proxy, seed 0, has 24 steps (0 to 46), the others have 48 steps (0 to 47)"
        in report.reason
    )
    assert report.details["without_doubt"] == "REPRODUCED"
    assert report.overall == pytest.approx(judge(a, b).overall, abs=0.05)


def test_a_metric_that_only_one_model_recorded_is_scored_without_it():
    report = judge(build(1, FAULT), build(2, FAULT, metrics={m: v for m, v in LEVELS.items() if m != "entropy"}))
    assert report.verdict == "INCONCLUSIVE"
    assert "entropy is missing in the clean arm of the proxy" in report.reason
    assert "entropy" not in report.symptoms["original"]


def test_a_primary_metric_that_nobody_recorded_is_not_compared():
    metrics = {"loss": 0.02, "grad_norm": 0.6}
    report = judge(build(1, FAULT, metrics=metrics), build(2, FAULT, metrics=metrics))
    assert report.verdict == "REPRODUCED"
    assert report.to_json()["fidelity"]["entropy"] is None
    secondary = {"kl": 0.01}
    report = judge(build(1, metrics=secondary), build(2, metrics=secondary))
    assert report.verdict == "INCONCLUSIVE"
    assert "neither model recorded any of loss, grad_norm, entropy" in report.reason


@pytest.mark.parametrize("by", [2, 3])
def test_thinning_both_keeps_the_score_of_a_lasting_response(by):
    other = {"grad_norm": shift(0.2, 3), "loss": shift(1.5), "entropy": drift(-0.015)}
    a, b = build(1, FAULT, steps=80), build(2, other, steps=80)
    full, thin = judge(a, b), judge(thinned(a, by), thinned(b, by))
    assert thin.verdict == full.verdict == "REPRODUCED"
    assert thin.overall == pytest.approx(full.overall, abs=0.05)


@pytest.mark.parametrize(
    ("original", "proxy", "expects", "words"),
    [
        (3, 3, (), "a spike could not have been seen"),  # lost in both
        (4, 3, (), "only the original shows a spike of grad_norm"),  # lost in the proxy
        (3, 4, (Spikes("grad_norm"),), "neither model shows that grad_norm"),
    ],
)
def test_a_spike_between_recorded_steps_never_agrees(original, proxy, expects, words):
    def arms(key, at):
        lasting = {"kl": shift(1.0)} if expects else {}
        return thinned(build(key, {"grad_norm": spike(2.0, at), **lasting}))

    report = judge(arms(1, original), arms(2, 3 if expects else proxy), expects=expects)
    assert report.verdict == "INCONCLUSIVE"
    assert words in report.reason
    assert "steps 8 and 10" in report.reason


def test_a_claim_that_lasts_is_no_doubt():
    pair = [thinned(build(k, {"kl": shift(1.0)})) for k in (1, 2)]
    assert judge(*pair, expects=(Rises("kl"),)).verdict == "REPRODUCED"


@pytest.mark.parametrize("places", [1, 3, 4, 6])
def test_the_decimal_place_of_printed_numbers_is_found(places):
    values = np.random.default_rng(places).normal(size=(3, 40))
    assert quantum_of(values) == 0.0
    assert quantum_of(values.astype(np.float32).astype(float)) == 0.0
    assert quantum_of(np.round(values, places)) == 10.0**-places
    assert quantum_of(np.round(values, places), values) == 0.0


def test_whole_numbers_and_constants_are_not_printed_numbers():
    assert quantum_of(np.arange(12.0).reshape(3, 4)) == 0.0
    assert quantum_of(np.full((3, 8), 0.5)) == 0.0
    assert quantum_of(np.full((3, 8), np.nan)) == 0.0


def test_the_null_spread_of_printed_numbers_is_at_least_their_last_place():
    clean = np.round(0.6 + 0.01 * np.random.default_rng(0).normal(size=(3, 16)), 4)
    for log in (True, False):
        scale = scale_of(clean, log, 1e-4)
        spread = noise_of(scale.response(clean, clean), "replay", scale.resolution(2.0**-23, 1e-4)).spread
        one_place = np.abs(scale.response(clean + 1e-4, clean))
        assert spread.min() >= 0.9 * one_place.min()
        assert spread.max() <= 1.1 * one_place.max()


def test_rounding_to_four_decimals_is_no_response():
    same = build(1)
    printed = ArmSet(same.clean, rounded(same, 4).clean, same.null, same.fired)
    four = every(printed, lambda t: Trace.from_columns(t.steps, {m: [round(v, 4) for v in t.column(m)] for m in
                                                                  t.metrics}))  # fmt: skip
    report = judge(four, four)
    assert {s.kind for s in report.symptoms["original"].values()} == {"none"}
    a, b = (rounded(build(k, {"grad_norm": shift(0.3), "loss": shift(2.0)}), 4) for k in (1, 2))
    assert judge(a, b).verdict == "REPRODUCED"


def test_seeds_needed_follow_from_the_square_root_law():
    # half-width 0.2 at 4 seeds; 0.1 is needed: 16 seeds
    assert seeds_for_interval(0.8, (0.6, 0.95), 0.7, 4) == 16
    assert seeds_for_interval(0.6, (0.3, 0.8), 0.7, 3) == 12
    assert seeds_for_interval(0.701, (0.5, 0.9), 0.7, 3) is None
    assert seeds_for_interval(0.7, (0.5, 0.9), 0.7, 3) is None
    assert seeds_for_margin(reach=0.05, mean=0.01, margin=0.02, seeds=3) == 48
    assert seeds_for_margin(reach=0.05, mean=0.03, margin=0.02, seeds=3) is None
    assert seeds_for_margin(reach=math.inf, mean=0.0, margin=0.02, seeds=3) is None
    assert advice(4, 3) == "about 1 more seed would settle it if the scatter stays as it is"
    assert advice(16, 3).startswith("about 13 more seeds would settle it")
    assert advice(None, 3) == "more seeds are not expected to settle it (up to 64)"


def test_an_inconclusive_report_says_how_many_seeds_it_lacks():
    def uneven(strength):
        return {"grad_norm": lambda t, rng: np.full(len(t), strength * rng.uniform(0.2, 2.0))}

    reports = [judge(build((k, 1), uneven(0.3)), build((k, 2), uneven(1.4))) for k in range(12)]
    straddling = [r for r in reports if r.verdict == "INCONCLUSIVE"]
    assert straddling
    for report in straddling:
        needed = report.details["seeds_needed"]
        half = max(abs(end - report.overall) for end in report.ci)
        assert needed is None or 3 < needed <= math.ceil(3 * (half / abs(report.overall - 0.7)) ** 2)
        assert ("would settle it" if needed else "not expected to settle it") in report.reason
    settled = judge(build(1, FAULT), build(2, FAULT))
    assert settled.details["seeds_needed"] is None
    assert "settle" not in settled.reason


def test_attenuation_is_that_of_the_healthy_models():
    found = attenuation(
        {
            "original": {"topk_mass": 0.25, "grad_norm": 2.0, "grad_norm/experts": 1.0},
            "proxy": {"topk_mass": 0.5, "grad_norm": 2.0, "grad_norm/experts": 0.5},
        }
    )
    assert found["topk_mass"] == {"original": 0.25, "proxy": 0.5, "size_ratio": pytest.approx(0.5)}
    assert found["expert_share"] == {"original": 0.25, "proxy": 0.0625, "size_ratio": pytest.approx(0.25)}
    assert attenuation({"original": {"loss": 1.0}, "proxy": {"loss": 1.0}}) == {}
