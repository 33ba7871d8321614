"""Synthetic arms with known responses: clean levels, noise, and what a fault adds."""

import numpy as np

from harness.fidelity import ArmSet
from harness.fidelity.metrics import METRICS
from harness.trace import Trace

STEPS, ONSET, SEEDS = 24, 8, 3
LEVELS = {"loss": 0.02, "grad_norm": 0.6, "entropy": 0.9, "kl": 0.01, "update_norm": 0.02, "reward": 0.5}


def noise(rng, steps, rho):
    """AR(1) of unit variance; a random walk (unit mean square) for rho = 1."""
    e = rng.normal(size=steps)
    if rho == 1:
        walk = np.cumsum(e)
        return walk / np.sqrt(steps / 2)
    x = np.empty(steps)
    x[0] = e[0]
    for t in range(1, steps):
        x[t] = rho * x[t - 1] + np.sqrt(1 - rho**2) * e[t]
    return x


def column(metric, level, x, spread=0.1):
    """Turn unit noise and response (in log units or spreads) into values of the metric."""
    return level * np.exp(spread * x) if METRICS[metric].positive else level + level * spread * x


def build(key, responses=None, *, metrics=LEVELS, mode="replay", seeds=SEEDS, steps=STEPS, onset=ONSET, **options):
    """One model's arms.

    Args:
        key: Key of the model's noise.
        responses: ``{metric: f(t, rng) -> response}``, t counted from onset; a log ratio for positive metrics, else
            in clean spreads; or raw values if f has the attribute ``raw``.
        metrics: Clean level by metric.
        mode: replay (null drifts from 1e-7) or free (null has noise of its own).
        options: rho, scale (of levels), spread, null (size of a replay null), faulted_noise.
    """
    rho, scale, spread = options.get("rho", 0.0), options.get("scale", 1.0), options.get("spread", 0.1)
    arms = {"clean": {}, "faulted": {}, "null": {}}
    for seed in range(seeds):
        columns = {condition: {} for condition in arms}
        for i, (metric, level) in enumerate(metrics.items()):
            rng = np.random.default_rng([*np.atleast_1d(key), seed, i])
            level = level * scale
            x = noise(rng, steps, rho)
            after = np.arange(steps) >= onset
            t = np.arange(steps - onset)
            values = {c: x.copy() for c in arms}
            if mode == "free":
                for c in ("faulted", "null"):
                    fresh = noise(rng, steps, rho)
                    if c == "null" or options.get("faulted_noise", True):
                        values[c] = np.where(after, fresh, x)
            else:
                tiny = options.get("null", 1e-6)
                values["null"][after] += tiny * np.exp(0.3 * t) * rng.normal(size=len(t))
            f = (responses or {}).get(metric)
            raw = None
            if f is not None:
                r = np.asarray(f(t, rng), dtype=float)
                if getattr(f, "raw", False):
                    raw = r
                else:
                    values["faulted"][after] += r / spread if METRICS[metric].positive else r
            for c in arms:
                columns[c][metric] = column(metric, level, values[c], spread)
            if raw is not None:
                columns["faulted"][metric][after] = raw
        for c in arms:
            arms[c][seed] = Trace.from_columns(range(steps), {m: list(v) for m, v in columns[c].items()})
    return ArmSet(**arms, fired=dict.fromkeys(range(seeds), steps - onset))


def raw(f):
    f.raw = True
    return f


def shift(size, at=0):
    return lambda t, rng: np.where(t >= at, size, 0.0)


def drift(slope, at=0):
    return lambda t, rng: slope * np.maximum(t - at + 1, 0)


def spike(size, at=3):
    return lambda t, rng: np.where(t == at, size, 0.0)


def scatter(size):
    return lambda t, rng: size * rng.normal(size=len(t))


def becomes(value, at=4, usual=0.5):
    return raw(lambda t, rng: np.where(t >= at, value, usual + 0.01 * rng.normal(size=len(t))))
