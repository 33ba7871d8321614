import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.fidelity.metrics import DEFAULT
from harness.fidelity.score import (
    ALIKE,
    Table,
    agreement,
    relevance,
    shape_agreement,
    size_agreement,
    trip_agreement,
    warped_distance,
)
from harness.fidelity.symptoms import DRIFT, KINDS, NONE, NONFINITE, SHIFT, SPREAD, Symptoms

quick = settings(max_examples=60, deadline=None, derandomize=True)
courses = st.integers(2, 14).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(-20, 20), min_size=n, max_size=n)] * 2, st.integers(0, n))
)


def naive_warped_distance(a, b, band):
    """Shortest path over the full matrix, by recursion on the definition."""
    n = len(a)
    full = np.full((n, n), np.inf)
    for i in range(n):
        for j in range(n):
            if abs(i - j) > band:
                continue
            before = [full[i - 1, j] if i else np.inf, full[i, j - 1] if j else np.inf]
            before.append(full[i - 1, j - 1] if i and j else np.inf)
            full[i, j] = abs(a[i] - b[j]) + (0 if i == j == 0 else min(before))
    return full[-1, -1]


@quick
@given(courses)
def test_banded_warping_is_exact(case):
    a, b, band = case
    got = warped_distance(np.array([a, b], float), np.array([b, a], float), band)
    assert got == pytest.approx([naive_warped_distance(a, b, band), naive_warped_distance(b, a, band)])


def test_warping_absorbs_a_lag_within_the_band():
    a = np.array([[0, 0, 1, 2, 1, 0, 0, 0.0]])
    b = np.array([[0, 0, 0, 1, 2, 1, 0, 0.0]])
    assert warped_distance(a, b, 1)[0] == 0
    assert warped_distance(a, b, 0)[0] == np.abs(a - b).sum()


def test_size_agreement_is_on_a_log_scale():
    got = size_agreement(np.array([1.0, 1.0, 2.0, 1.0, 0.0, 0.0]), np.array([1.0, 2.0, 1.0, 4.0, 1.0, 0.0]))
    assert got == pytest.approx([1.0, math.exp(-0.5), math.exp(-0.5), math.exp(-1), 0.0, 1.0])


@quick
@given(st.lists(st.integers(-9, 9), min_size=4, max_size=90), st.floats(1e-3, 1e3))
def test_shape_ignores_size_and_is_symmetric(course, factor):
    p = np.array([course], dtype=float)
    q = p[:, ::-1].copy()
    forth = shape_agreement(p, q)[0]
    assert 0 <= forth <= 1
    assert shape_agreement(q, p)[0] == pytest.approx(forth)
    assert shape_agreement(factor * p, q)[0] == pytest.approx(forth, abs=1e-6)
    if p.any() and len(course) <= 64:
        assert shape_agreement(p, factor * p)[0] == pytest.approx(1.0, abs=1e-6)
        assert shape_agreement(p, -p)[0] < 0.5


def symptoms(kind=SHIFT, sign=1, onset=0, size=0.3, which=0, profile=None):
    profile = np.ones((1, 16)) if profile is None else np.array([profile])
    one = np.array([1])
    return Symptoms(
        kind * one,
        sign * one,
        onset * one,
        np.array([size]),
        which * one,
        profile,
        np.array([size]),
        np.abs(profile),
        onset * one,
    )


def score(a, b):
    return agreement(a, b, DEFAULT)[0]


def test_agreement_by_hand():
    assert score(symptoms(), symptoms()) == pytest.approx(1.0)
    assert score(symptoms(), symptoms(size=0.6)) == pytest.approx(0.25 + 0.4 * math.exp(-0.5) + 0.35)
    assert score(symptoms(), symptoms(onset=4)) == pytest.approx(0.25 * 0.5 + 0.4 + 0.35)
    assert score(symptoms(), symptoms(sign=-1)) == 0.0
    assert score(symptoms(), symptoms(kind=NONE, sign=0)) == 0.0
    assert score(symptoms(), symptoms(kind=DRIFT)) == pytest.approx(0.85)
    inf = symptoms(NONFINITE, 1, 4, 9.2, 2)
    assert score(inf, inf) == pytest.approx(1.0)
    assert score(inf, symptoms(NONFINITE, 0, 4, 9.2, 1)) == pytest.approx(0.8)


def test_what_an_engineer_accepts_clears_the_bar():
    assert score(symptoms(size=0.30), symptoms(size=0.20)) > 0.85
    assert score(symptoms(size=0.30), symptoms(size=0.15, onset=1)) > 0.80


def test_kinds_resemble_each_other_symmetrically():
    assert (ALIKE == ALIKE.T).all()
    assert (np.diag(ALIKE)[1:] == 1).all()
    assert {KINDS[k]: v for k, v in enumerate(ALIKE[NONE]) if v} == {"spread_change": 0.5}
    assert len(KINDS) == len(ALIKE)


def test_relevance_rises_from_one_margin_to_five():
    sizes = [0.01, 0.02, 0.06, 0.1, 5.0]
    got = [relevance(symptoms(size=s), symptoms(NONE, size=9.0), 0.02, DEFAULT)[0] for s in sizes]
    assert got == pytest.approx([0.001, 0.001, 0.501, 1.001, 1.001])
    assert relevance(symptoms(NONE), symptoms(NONE), 0.02, DEFAULT)[0] == 0
    kinds = ((SPREAD, SPREAD), (SPREAD, NONE), (SPREAD, SHIFT), (NONE, SHIFT))
    got = [relevance(symptoms(a), symptoms(b), 0.02, DEFAULT)[0] / 1.001 for a, b in kinds]
    assert got == pytest.approx([0.1, 0.1, math.sqrt(0.1), 1.0])


def test_overall_by_hand():
    names = ("loss", "grad_norm", "kl", "update_norm")
    table = Table(names, np.array([[1.0], [0.5], [0.2], [0.4]]), np.array([[1.0], [0.5], [1.0], [0.0]]))
    primary = (1.0 + 0.25) / 1.5
    assert table.overall(DEFAULT)[0] == pytest.approx(0.65 * primary + 0.35 * 0.2)
    silent = Table(names, table.agreement, np.array([[0.0], [0.0], [1.0], [1.0]]))
    assert silent.overall(DEFAULT)[0] == pytest.approx(0.3)  # the secondary ones decide
    nothing = Table(names, table.agreement, np.zeros((4, 1)))
    assert nothing.overall(DEFAULT)[0] == 0.0


def test_severities_to_trip():
    assert trip_agreement((2.0, 2.0)) == 1.0
    assert trip_agreement((1.0, 4.0)) == pytest.approx(math.exp(-1))
    assert trip_agreement((1.0, None)) == 0.0
    assert trip_agreement((None, None)) is None
