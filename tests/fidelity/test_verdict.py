import json
import math
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.claims import Falls, NonFinite, Rises, Stays
from harness.fidelity import DEFAULT, ArmSet, Thresholds, compare, responses
from harness.fidelity.metrics import METRICS
from harness.trace import Trace
from tests.fidelity.synthetic import LEVELS, ONSET, STEPS, becomes, build, drift, scatter, shift, spike
from tests.fidelity.test_align_noise import change, replace

FAULT = {"grad_norm": shift(0.3), "loss": shift(2.0), "entropy": drift(-0.02)}
EVERY = {m: LEVELS.get(m, 0.3) for m in METRICS}


def judge(a, b, mode="replay", **options):
    options.setdefault("bootstrap", 200)
    return compare(a, b, mode=mode, onset=options.pop("onset", ONSET), **options)


@pytest.mark.parametrize(
    "fault",
    [
        {"grad_norm": shift(0.3)},
        {"entropy": drift(-0.03, 4)},
        {"grad_norm": spike(2.0)},
        {"grad_norm": becomes(math.inf)},
        {"loss": becomes(math.nan)},
        {"update_norm": becomes(0.0, at=0)},
        {"loss": scatter(2.0)},
        {"kl": shift(1.0)},
        FAULT,
    ],
)
def test_the_same_fault_in_both_is_reproduced(fault):
    report = judge(build(1, fault), build(2, fault, scale=3.0))
    assert report.verdict == "REPRODUCED", report.reason
    assert report.ci[0] >= 0.70
    assert set(report.fidelity) == {"loss", "grad_norm", "entropy", "kl", "update_norm"}  # no reward in replay
    assert all((report.fidelity[m] is None) == (m not in fault) for m in report.fidelity)


def test_what_an_engineer_accepts():
    up30 = build(1, {"grad_norm": shift(0.30), "loss": shift(3.0)})
    up20 = build(2, {"grad_norm": shift(0.20), "loss": shift(2.0)})
    report = judge(up30, up20)
    assert report.verdict == "REPRODUCED"
    assert report.overall > 0.8
    assert report.size_ratios["grad_norm"] == pytest.approx(2 / 3, rel=1e-3)
    assert report.onset_lags == {"grad_norm": 0, "loss": 0}


def test_free_mode_sees_a_match_through_sampling_noise():
    report = judge(build(1, FAULT, mode="free", seeds=5), build(2, FAULT, mode="free", seeds=5), mode="free")
    assert report.verdict == "REPRODUCED", report.reason


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        ({"grad_norm": shift(-0.3), "loss": shift(-2.0), "entropy": drift(0.02)}, "NOT_REPRODUCED"),
        ({"kl": shift(1.0)}, "NOT_REPRODUCED"),
        ({"grad_norm": becomes(math.inf)}, "NOT_REPRODUCED"),
        ({}, "NOT_REPRODUCED"),
        ({"grad_norm": shift(0.3), "loss": shift(-2.0), "entropy": drift(-0.02)}, "PARTIAL"),
    ],
)
def test_another_fault_is_not_reproduced(other, verdict):
    report = judge(build(1, FAULT), build(2, other))
    assert report.verdict == verdict, report.reason
    assert report.ci[1] < 0.70


def test_near_misses_lose_in_the_right_order():
    def overall(f):
        return judge(build(1, {"grad_norm": shift(0.3, 2)}), build(2, {"grad_norm": f})).overall

    exact, late, tiny, opposite = (overall(f) for f in (shift(0.3, 2), shift(0.3, 6), shift(0.03, 2), shift(-0.3, 2)))
    assert exact == pytest.approx(1.0, abs=1e-3)
    assert exact > late > tiny > opposite == 0.0


def test_a_fault_that_does_nothing_has_no_effect():
    for mode in ("replay", "free"):
        same = build(1, mode=mode)
        a = ArmSet(same.clean, same.clean, same.null, same.fired)  # bit for bit
        report = judge(a, a, mode=mode)
        assert report.verdict == "NO_EFFECT"
        assert report.overall is None
        assert all(v is None for v in report.fidelity.values())


def test_a_response_inside_the_margin_is_no_effect_and_a_noisy_one_is_not_known():
    report = judge(build(1, {"grad_norm": shift(0.01)}), build(2, {"grad_norm": shift(0.5)}))
    assert report.verdict == "NO_EFFECT"
    assert "grad_norm of the original" in report.reason
    assert "margin 0.02" in report.reason
    noisy = judge(build(1, mode="free"), build(2, mode="free"), mode="free")
    assert noisy.verdict == "INCONCLUSIVE"
    assert "not shown" in noisy.reason


@pytest.mark.parametrize("condition", ["faulted", "null"])
@pytest.mark.parametrize("model", [0, 1])
def test_a_difference_before_onset_is_void(condition, model):
    pair = [build(1, FAULT), build(2, FAULT)]
    pair[model] = change(pair[model], condition, 2, 7, "loss", 0.123)
    report = judge(*pair)
    assert report.verdict == "VOID"
    assert f"{condition} arm of the {('original', 'proxy')[model]}, seed 2" in report.reason
    assert "loss at step 7 is 0.123" in report.reason
    assert judge(*pair, onset=0).verdict != "VOID"  # a configuration fault has no healthy stretch


@pytest.mark.parametrize(("who", "said"), [((0,), "original"), ((1,), "proxy"), ((0, 1), "and the proxy")])
def test_a_fault_that_never_fired_is_void(who, said):
    pair = [build(1, FAULT), build(2, FAULT)]
    for i in who:
        pair[i] = ArmSet(pair[i].clean, pair[i].faulted, pair[i].null, fired=dict.fromkeys(range(3), 0))
    report = judge(*pair)
    assert report.verdict == "VOID"
    assert "never fired" in report.reason
    assert said in report.reason
    assert report.fired == {"original": 0 if 0 in who else 48, "proxy": 0 if 1 in who else 48}


def test_missing_data_never_pass():
    a, b = build(1, FAULT), build(2, FAULT)
    scored = {
        "has 20 steps": replace(b, "faulted", 0, b.faulted[0][:20]),
        "grad_norm is missing": change(b, "faulted", 1, 12, "grad_norm", None),
        "kl is missing": change(b, "clean", 1, 3, "kl", None),
    }
    full = judge(a, b)
    for words, odd in scored.items():
        report = judge(a, odd)
        assert report.verdict == "INCONCLUSIVE"
        assert words in report.reason
        assert report.details["without_doubt"] == full.verdict == "REPRODUCED"
        assert report.overall == pytest.approx(full.overall, abs=0.05)
    cases = {
        "has 9 steps": replace(b, "faulted", 0, b.faulted[0][:9]),
        "no steps": replace(b, "faulted", 0, Trace()),
        "fewer than the 3 needed": build(2, FAULT, seeds=1),
        "clean arm of the proxy is missing for seed 2": ArmSet(
            {0: b.clean[0], 1: b.clean[1]}, b.faulted, b.null, b.fired
        ),
    }
    for words, odd in cases.items():
        report = judge(a, odd)
        assert report.verdict == "INCONCLUSIVE"
        assert words in report.reason
        assert report.overall is None
    nothing = ArmSet({}, {}, {}, {})
    assert judge(nothing, nothing).verdict == "INCONCLUSIVE"
    assert judge(a, build(2, FAULT, metrics={"loss": 0.02})).verdict == "INCONCLUSIVE"


def everywhere(arms, metric, value):
    out = {
        condition: {
            seed: Trace.from_columns(
                trace.steps, {m: [value] * len(trace) if m == metric else trace.column(m) for m in trace.metrics}
            )
            for seed, trace in getattr(arms, condition).items()
        }
        for condition in ("clean", "faulted", "null")
    }
    return ArmSet(**out, fired=arms.fired)


def test_nan_in_clean_and_faulted_is_not_a_symptom():
    nan = [everywhere(build(k, {"grad_norm": shift(0.3)}), "entropy", math.nan) for k in (1, 2)]
    report = judge(*nan)
    assert report.verdict == "INCONCLUSIVE"
    assert "entropy is not finite" in report.reason
    report = judge(*[everywhere(build(k, {"grad_norm": shift(0.3)}), "kl", math.nan) for k in (1, 2)])
    assert report.verdict == "REPRODUCED"  # a secondary metric that is ill in both is left out
    assert "kl" not in report.symptoms["original"]
    assert report.to_json()["fidelity"]["kl"] is None
    one = judge(everywhere(build(1, FAULT), "kl", math.nan), build(2, FAULT))
    assert one.verdict == "INCONCLUSIVE"
    assert "of the original from step" in one.reason


def test_a_nan_of_both_twins_in_a_few_steps_is_skipped():
    pair = [build(k, {"grad_norm": shift(0.3)}) for k in (1, 2)]
    for i, arms in enumerate(pair):
        for condition in ("clean", "faulted", "null"):
            arms = change(arms, condition, 0, 12, "loss", math.nan)
        pair[i] = arms
    report = judge(*pair)
    assert report.symptoms["original"]["loss"].kind == "none"
    assert report.symptoms["original"]["loss"].confidence == 0.0  # not shown either
    assert report.verdict == "REPRODUCED"


def test_constant_metrics_have_a_verdict():
    flat = [everywhere(build(k, {"grad_norm": shift(0.3)}), "entropy", 0.7) for k in (1, 2)]
    assert judge(*flat).verdict == "REPRODUCED"
    assert judge(*flat).fidelity["entropy"] is None
    still = [everywhere(everywhere(everywhere(build(k), m1, 0.0), "loss", 0.0), "grad_norm", 1.0) for k, m1 in
             ((1, "entropy"), (2, "entropy"))]  # fmt: skip
    assert judge(*still).verdict == "NO_EFFECT"


def test_a_null_spread_of_zero_is_handled():
    pair = [build(k, {"grad_norm": shift(0.3)}, null=0.0) for k in (1, 2)]
    report = judge(*pair)
    assert report.verdict == "REPRODUCED"
    assert math.isfinite(report.symptoms["original"]["grad_norm"].null_units)
    assert judge(build(1, null=0.0), build(2, null=0.0)).verdict == "NO_EFFECT"


def test_structural_zeros_are_no_agreement():
    metrics = {"loss": 0.02, "grad_norm": 0.6, "entropy": 0.9, "reward": 0.5, "response_length": 5.0}
    report = judge(build(1, {"grad_norm": shift(0.3)}, metrics=metrics), build(2, metrics=metrics))
    assert report.verdict == "NOT_REPRODUCED"
    assert report.overall == 0.0
    assert report.to_json()["fidelity"]["reward"] is None


def test_a_match_that_noise_may_hide_is_inconclusive():
    loud = build(1, {"grad_norm": shift(0.5)}, mode="free")
    for key in range(2, 8):
        quiet = build(key, {"grad_norm": shift(0.5)}, mode="free", rho=1.0, spread=0.6)
        report = judge(loud, quiet, mode="free")
        assert report.verdict == "INCONCLUSIVE"
        assert report.details["undecided"] == ["grad_norm"]
        assert "too noisy to tell in grad_norm" in report.reason


def test_false_alarms_are_rare_in_free_mode():
    alarms = 0
    draws = 240
    for i in range(draws):
        arms = build((7, i), mode="free", rho=(0.0, 0.8, 1.0)[i % 3])
        report = judge(arms, arms, mode="free", bootstrap=1)
        alarms += report.verdict != "INCONCLUSIVE"
    assert alarms <= 1  # the upper 95% bound is then 2.0%


def test_false_alarms_are_rare_in_replay():
    for i in range(60):
        chaos = {
            m: lambda t, rng, m=m: (
                1e-3 * np.exp(0.3 * t) * rng.normal(size=len(t)) * (0.1 if METRICS[m].positive else 1)
            )
            for m in LEVELS
        }
        arms = build((8, i), chaos, null=1e-3)
        report = judge(arms, arms, bootstrap=1)
        assert {s.kind for s in report.symptoms["original"].values()} == {"none"}


def test_severity_to_trip_is_a_part_of_the_score():
    a, b = build(1, {"grad_norm": becomes(math.inf)}), build(2, {"grad_norm": becomes(math.inf)})
    assert judge(a, b, severity_to_trip=(8.0, 8.0)).overall == pytest.approx(1.0)
    report = judge(a, b, severity_to_trip=(8.0, 32.0))
    assert report.overall == pytest.approx(0.8 + 0.2 * math.exp(-1))
    assert report.to_json()["severity_to_trip"] == {"original": 8.0, "proxy": 32.0}
    assert judge(a, b, severity_to_trip=(8.0, None)).overall == pytest.approx(0.8)
    assert judge(a, b, severity_to_trip=(None, None)).overall == pytest.approx(1.0)


def test_claims_are_reported_for_both_models():
    report = judge(
        build(1, {"grad_norm": becomes(math.inf), "entropy": drift(-0.02)}),
        build(2, {"grad_norm": becomes(math.inf)}),
        expects=(NonFinite("grad_norm"), Falls("entropy"), Stays("kl"), Rises("reward")),
    )
    assert report.claims == (
        {"claim": "grad_norm becomes non-finite", "original": True, "proxy": True},
        {"claim": "entropy falls", "original": True, "proxy": False},
        {"claim": "kl does not respond", "original": True, "proxy": True},
        {"claim": "reward rises", "original": None, "proxy": None},
    )


def test_reason_names_metric_step_value_null_spread_and_bar():
    report = judge(build(1, {"grad_norm": shift(0.3, 4)}), build(2, {"grad_norm": shift(0.3, 4)}))
    for words in ("grad_norm", "from step 12", "+0.3 log ratio", "null spread", "the bar 0.70", "original", "proxy"):
        assert words in report.reason
    assert report.reason.count(".\n") == 0
    assert report.reason.endswith(".")


def test_json_has_the_documented_shape_and_is_strict():
    report = judge(build(1, {"grad_norm": becomes(math.inf)}), build(2, {"grad_norm": becomes(math.inf)}))
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["verdict"] == "REPRODUCED"
    assert data["fired"] == {"original": 48, "proxy": 48}
    assert data["fidelity"]["overall"] == pytest.approx(1.0)
    assert data["fidelity"]["ci"] == pytest.approx([1.0, 1.0])
    assert data["fidelity"]["loss"] is None
    assert set(data["fidelity"]) == {"overall", "ci", *METRICS}
    symptom = data["symptoms"]["proxy"]["grad_norm"]
    assert (symptom["kind"], symptom["sign"], symptom["onset"], symptom["size"]) == ("nonfinite", 1, 12, "inf")
    assert data["severity_to_trip"] is None


def test_same_input_same_report():
    a, b = build(1, FAULT, mode="free"), build(2, FAULT, mode="free")
    assert judge(a, b, mode="free").to_json() == judge(a, b, mode="free").to_json()
    assert judge(a, b, mode="free").ci != judge(a, b, mode="free", seed=1).ci


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.floats(1e-3, 1e3), st.integers(0, 3), st.sampled_from(["replay", "free"]))
def test_rescaling_a_metric_moves_the_score_by_nothing(factor, key, mode):
    a, b, scaled = (build((key, k), FAULT, mode=mode, scale=s) for k, s in ((1, 1.0), (2, 1.0), (2, factor)))
    assert judge(a, scaled, mode=mode).overall == pytest.approx(judge(a, b, mode=mode).overall, abs=0.01)


def test_dropping_steps_moves_the_score_little():
    def thinned(arms):
        keep = [s for s in range(2 * STEPS) if s % 10 != 3]
        parts = {
            c: {k: Trace([t[s] for s in keep]) for k, t in getattr(arms, c).items()}
            for c in ("clean", "faulted", "null")
        }
        return ArmSet(**parts, fired=arms.fired)

    other = {"grad_norm": shift(0.2, 2), "loss": shift(1.5), "entropy": drift(-0.01)}
    a, b = build(1, FAULT, steps=2 * STEPS), build(2, other, steps=2 * STEPS)
    assert judge(thinned(a), thinned(b)).overall == pytest.approx(judge(a, b).overall, abs=0.05)


def test_invalid_arguments_are_errors():
    arms = build(1)
    for bad in ({"onset": -1}, {"bootstrap": 0}, {"mode": "live"}):
        with pytest.raises(ValueError, match="invalid mode"):
            judge(arms, arms, **bad)


def test_responses_are_there_to_be_plotted():
    a, b = build(1, {"grad_norm": shift(0.3)}), build(2, {"grad_norm": shift(0.15)})
    seen = responses(a, b, ["grad_norm"], mode="replay", onset=ONSET)
    assert seen["original"]["grad_norm"].response == pytest.approx(np.full((3, 16), 0.3), rel=1e-3)
    assert seen["proxy"]["grad_norm"].response == pytest.approx(np.full((3, 16), 0.15), rel=1e-3)
    assert seen["proxy"]["grad_norm"].noise.spread.shape == (16,)


def test_thresholds_can_be_set():
    a, b = build(1, {"grad_norm": shift(0.3)}), build(2, {"grad_norm": shift(0.15)})
    assert judge(a, b).verdict == "REPRODUCED"
    assert judge(a, b, thresholds=Thresholds(bar=0.95)).verdict == "PARTIAL"
    assert Thresholds() == DEFAULT


def test_a_thousand_resamples_take_about_a_second():
    a, b = build(1, FAULT, metrics=EVERY), build(2, FAULT, metrics=EVERY)
    started = time.perf_counter()
    assert judge(a, b, bootstrap=1000).verdict == "REPRODUCED"
    assert time.perf_counter() - started < 10  # 0.5 s on a quiet core


def test_importing_the_package_loads_no_numpy():
    code = "import sys, harness.fidelity; print('numpy' in sys.modules); harness.fidelity.compare"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
