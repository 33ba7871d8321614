"""Put the arms of a model side by side, and say what keeps them from being compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.fidelity.metrics import METRICS, Mode, Thresholds
from harness.trace import Trace, to_json_value

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Conditions = ("faulted", "null")


@dataclass(frozen=True)
class ArmSet:
    """All traces of one model (original or proxy), by seed.

    Attributes:
        clean: The healthy twin.
        faulted: The same run with the fault.
        null: The A/A control.
        fired: In how many steps the fault really ran in the faulted arm.
        working_resolution: Relative size of one rounding unit in what was recorded; None for float32 (2^-23).
    """

    clean: Mapping[int, Trace]
    faulted: Mapping[int, Trace]
    null: Mapping[int, Trace]
    fired: Mapping[int, int]
    working_resolution: float | None = None

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds for which all three arms are there."""
        return tuple(sorted({*self.clean} & {*self.faulted} & {*self.null}))

    @property
    def resolution(self) -> float:
        """The working resolution, float32 by default."""
        return 2.0**-23 if self.working_resolution is None else self.working_resolution

    def arms(self) -> Iterator[tuple[str, int, Trace]]:
        """Every trace with its condition and seed."""
        for condition in ("clean", *Conditions):
            for seed, trace in sorted(getattr(self, condition).items()):
                yield condition, seed, trace


def stack(arms: Mapping[int, Trace], seeds: tuple[int, ...], metric: str, onset: int) -> Floats:
    """Return one metric from onset on: float64 ``[seeds, steps]``. The arms must have the same steps."""
    first = sum(step < onset for step in arms[seeds[0]].steps)
    return np.stack([arms[seed].array(metric)[0][first:] for seed in seeds])


def observed(original: ArmSet, proxy: ArmSet, mode: Mode) -> tuple[str, ...]:
    """Metrics of the table that either model recorded and that can respond in this mode, in the table's order."""
    recorded = {m for arms in (original, proxy) for _, _, trace in arms.arms() for m in trace.metrics}
    return tuple(m for m, spec in METRICS.items() if m in recorded and spec.observable(mode))


def difference_before_onset(model: str, arms: ArmSet, onset: int) -> str | None:
    """Find a value before onset in which an arm is not, bit for bit, its clean twin.

    Values that only one of the two has are missing data, which ``missing`` reports.

    Returns:
        A sentence with seed, arm, step, metric and both values; None if there is no such value.
    """
    for condition in Conditions:
        for seed, trace in sorted(getattr(arms, condition).items()):
            if seed not in arms.clean:
                continue
            found = _first_unequal_value(arms.clean[seed], trace, onset)
            if found is not None:
                step, metric, clean, other = found
                return (
                    f"the {condition} arm of the {model}, seed {seed}, differs from its clean twin before the onset "
                    f"at step {onset}: {metric} at step {step} is {to_json_value(other)}, not {to_json_value(clean)}"
                )
    return None


def _first_unequal_value(clean: Trace, other: Trace, onset: int) -> tuple[int, str, float, float] | None:
    common, rows, columns = np.intersect1d(clean.steps, other.steps, assume_unique=True, return_indices=True)
    rows, columns = rows[common < onset], columns[common < onset]
    best: tuple[int, str, float, float] | None = None
    for metric in clean.metrics:
        (a, in_a), (b, in_b) = clean.array(metric), other.array(metric)
        differs = (a[rows].view(np.uint64) != b[columns].view(np.uint64)) & in_a[rows] & in_b[columns]
        if differs.any():
            at = int(np.argmax(differs))
            step = clean.steps[rows[at]]
            if best is None or step < best[0]:
                best = step, metric, float(a[rows[at]]), float(b[columns[at]])
    return best


def never_fired(model: str, arms: ArmSet) -> str | None:
    """Name the seeds in whose faulted arm the fault did not run once; None if it ran in all of them."""
    idle = [seed for seed in sorted(arms.faulted) if arms.fired.get(seed, 0) <= 0]
    if not idle:
        return None
    return f"the {model} (seed {', '.join(map(str, idle))})"


def missing(original: ArmSet, proxy: ArmSet, mode: Mode, onset: int, thresholds: Thresholds) -> str | None:
    """Find missing data: arms, seeds, steps, metrics or values without which the two cannot be compared.

    Returns:
        A sentence that names the arm and what it lacks; None if everything is there.
    """
    reference: tuple[int, ...] | None = None
    for model, arms in (("original", original), ("proxy", proxy)):
        problem = _missing_seeds(model, arms, thresholds)
        if problem is not None:
            return problem
        for condition, seed, trace in arms.arms():
            reference = trace.steps if reference is None else reference
            if trace.steps != reference:
                return (
                    f"the {condition} arm of the {model}, seed {seed}, has {_span(trace.steps)}, "
                    f"the others have {_span(reference)}"
                )
    after = sum(step >= onset for step in reference or ())
    if after < thresholds.min_steps:
        return f"{after} steps from the onset at step {onset} on are fewer than the {thresholds.min_steps} needed"
    return _missing_values(original, proxy, mode)


def _missing_seeds(model: str, arms: ArmSet, thresholds: Thresholds) -> str | None:
    every = {*arms.clean} | {*arms.faulted} | {*arms.null}
    for condition in ("clean", *Conditions):
        absent = sorted(every - {*getattr(arms, condition)})
        if absent:
            return f"the {condition} arm of the {model} is missing for seed {', '.join(map(str, absent))}"
    if len(every) < thresholds.min_seeds:
        return f"the {model} has {len(every)} seeds, fewer than the {thresholds.min_seeds} needed"
    return None


def _span(steps: tuple[int, ...]) -> str:
    return f"{len(steps)} steps ({steps[0]} to {steps[-1]})" if steps else "no steps"


def _missing_values(original: ArmSet, proxy: ArmSet, mode: Mode) -> str | None:
    wanted = observed(original, proxy, mode)
    if not any(METRICS[m].primary for m in wanted):
        return f"neither model recorded any of {', '.join(m for m, spec in METRICS.items() if spec.primary)}"
    for metric in wanted:
        for model, arms in (("original", original), ("proxy", proxy)):
            for condition, seed, trace in arms.arms():
                present = trace.array(metric)[1]
                if not present.all():
                    step = trace.steps[int(np.argmin(present))]
                    return (
                        f"{metric} is missing in the {condition} arm of the {model}, seed {seed}: "
                        f"{int((~present).sum())} of {len(present)} steps, the first of them step {step}"
                    )
    return None
