"""The outer spine: does this pair's proxy reproduce this fault?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness import pairs, plan
from harness.arm import run_arm
from harness.catalogue import Entry, FaultSpec, find, find_remedy
from harness.claims import NonFinite
from harness.errors import UsageError
from harness.fleet import Event, Failure, Job, run_jobs
from harness.inject import stages_of
from harness.rl.engines import OWNED
from harness.rl.stages import TAPED
from harness.seams import Config, Module, describe_seam
from harness.spec import Condition
from harness.store import Store, StoredRun
from harness.trace import first_difference

if TYPE_CHECKING:
    from harness.fidelity import ArmSet, FidelityReport, Restoration, Thresholds
    from harness.plan import Arm, Request
    from harness.sequential import Look


@dataclass(frozen=True)
class Experiment:
    """What an experiment found.

    Attributes:
        request: What was asked.
        report: The comparison, or None if an arm crashed.
        failures: Arms that could not be run.
        runs: Every arm that was run, with its place in the store.
        ability: Exact-match rate of original, proxy and chance.
        severity_to_trip: Smallest severity tried that trips, per model; None for faults without a threshold.
        sets: The traces by model, as they were compared; empty if an arm crashed.
        restoration: What the remedy does; None if none was asked for, or an arm crashed.
        looks: Every look on the way, if seeds were added until the verdict was settled.
    """

    request: Request
    report: FidelityReport | None
    failures: tuple[Failure, ...]
    runs: tuple[tuple[Arm, StoredRun], ...]
    ability: dict[str, float]
    severity_to_trip: dict[str, float | None] | None
    sets: Mapping[str, ArmSet]
    restoration: Restoration | None = None
    looks: tuple[Look, ...] = ()

    @property
    def verdict(self) -> str:
        """The verdict in one word."""
        return "CRASHED" if self.report is None else self.report.verdict

    @property
    def reason(self) -> str:
        """The verdict's reason in one sentence."""
        if self.report is not None:
            return str(self.report.reason)
        first = self.failures[0]
        more = f" (and {len(self.failures) - 1} more arms)" if len(self.failures) > 1 else ""
        return f"{first.label} failed: {first.error}{more}"

    @property
    def conclusion(self) -> str:
        """The reason, and what is to be said about the remedy."""
        return self.reason if self.restoration is None else f"{self.reason} {self.restoration.reason}"

    @property
    def cost(self) -> dict[str, dict[str, float]]:
        """Seconds per step and peak memory of the clean run that samples, and parameters; ratio is proxy / original."""
        cost: dict[str, dict[str, float]] = {}
        condition = "tape" if self.request.mode == "replay" else "clean"
        for model in ("original", "proxy"):
            sidecars = [r.sidecar for a, r in self.runs if a.model == model and a.condition == condition]
            if sidecars:
                cost[model] = {
                    "seconds_per_step": statistics.median(s["seconds_per_step"] for s in sidecars),
                    "peak_rss_mb": max(s["peak_rss_mb"] for s in sidecars),
                    "parameters": sidecars[0]["parameters"],
                }
        if len(cost) == 2:
            cost["ratio"] = {k: cost["proxy"][k] / v for k, v in cost["original"].items()}
        return cost

    @property
    def versions(self) -> dict[str, str]:
        """Versions of what decides a trace, without importing any of it."""
        import platform
        from importlib.metadata import version

        from harness import __version__

        libraries = ("torch", "transformers", "numpy", "deepspeed")
        return {"harness": __version__, "python": platform.python_version(), **{n: version(n) for n in libraries}}


def reproduce(
    request: Request,
    home: Path,
    *,
    workers: int,
    prepare_progress: pairs.Progress,
    arm_progress: Callable[[Event], None] | None = None,
    thresholds: Thresholds | None = None,
) -> Experiment:
    """Run every arm of an experiment that the store does not hold yet, and compare.

    Args:
        request: What is to be found out.
        home: Where originals, proxies and runs are kept.
        workers: Number of worker processes.
        prepare_progress: Called while the two models are made.
        arm_progress: Called while the arms run.
        thresholds: Bars, margins, weights and confidence of the comparison; None for the default ones.

    Raises:
        UsageError: If the fault does not fit the engine or the models.
        AbilityError: If the proxy is not able enough.
    """
    from harness.fidelity import DEFAULT, FidelityReport, compare

    fault = find(request.fault.name)
    check(request, fault)
    models = pairs.prepare(request.pair, home, prepare_progress)
    ability = pairs.ability(request.pair, models, home, prepare_progress)
    store = Store(home / "store")
    planner = plan.Planner(request, models, store)
    arms = plan.plan(request, planner)
    results = run_arms(arms, store, workers, arm_progress)
    failures = tuple(r for r in results.values() if isinstance(r, Failure))
    runs = tuple((a, r) for a in arms if isinstance(r := results[a.job.key], StoredRun))
    if failures:
        return Experiment(request, None, failures, runs, ability, None, {})
    trips = severity_to_trip(
        request,
        lambda model, severity: plan.severity_probe(request, planner, model, severity),
        lambda probes: run_arms(probes, store, workers, arm_progress),
    )
    sets = {model: arm_set(model, runs, fault) for model in ("original", "proxy")}
    reason = twin_difference(runs)
    if reason is not None:
        fired_steps = {model: sum(arms.fired.values()) for model, arms in sets.items()}
        report = FidelityReport("VOID", reason, request.mode, request.fault.schedule.onset, fired_steps)
        return Experiment(request, report, (), runs, ability, trips, sets)
    report = compare(
        sets["original"],
        sets["proxy"],
        mode=request.mode,
        onset=request.fault.schedule.onset,
        thresholds=thresholds or DEFAULT,
        severity_to_trip=None if trips is None else (trips["original"], trips["proxy"]),
        expects=fault.expects,
    )
    restored = None if request.remedy is None else restore(request, report, runs, fault)
    return Experiment(request, report, (), runs, ability, trips, sets, restored)


def restore(
    request: Request, faulted: FidelityReport, runs: tuple[tuple[Arm, StoredRun], ...], fault: FaultSpec
) -> Restoration:
    """Compare the remedied arms with their clean twins, and that with what the fault alone did."""
    from harness.fidelity import compare, restoration

    assert request.remedy is not None
    sets = {model: arm_set(model, runs, fault, "remedied") for model in ("original", "proxy")}
    onset = request.fault.schedule.onset
    remedied = compare(sets["original"], sets["proxy"], mode=request.mode, onset=onset, bootstrap=1)
    return restoration(request.remedy.name, faulted, remedied)


def check(request: Request, fault: FaultSpec) -> None:
    """Refuse a fault that cannot act in this experiment.

    Raises:
        UsageError: With what to change.
    """
    if fault.engine is not None and fault.engine != request.engine:
        raise UsageError(f"fault {fault.name} needs the {fault.engine} engine; add --engine {fault.engine}")
    entries: list[Entry] = [fault] if request.remedy is None else [fault, find_remedy(request.remedy.name)]
    for entry in entries:
        taken = [s.value for s in stages_of(entry.seam) if s in OWNED[request.engine]]
        if taken:
            raise UsageError(
                f"{entry.kind} {entry.name} needs stage {', '.join(taken)}, which engine {request.engine} owns; "
                "use --engine torch or a configuration fault"
            )
    if len(entries) == 2 and isinstance(fault.seam, Module) and isinstance(entries[1].seam, Module):
        raise UsageError(f"{fault.name} and {entries[1].name} both replace the forward of modules; only one may")
    stages = stages_of(fault.seam)
    if stages and request.mode == "replay" and TAPED.issuperset(stages) and not fault.control:
        raise UsageError(
            f"fault {fault.name} acts on {describe_seam(fault.seam)}, which only hands on what the tape holds in "
            "replay; add --mode free"
        )
    if not fault.config and request.fault.schedule.onset < 1:
        raise UsageError(
            f"onset must be at least 1 so that there is a healthy stretch, got {request.fault.schedule.onset}"
        )


def run_arms(
    arms: list[Arm], store: Store, workers: int, progress: Callable[[Event], None] | None
) -> dict[str, StoredRun | Failure]:
    """Run arms once each, unless the store holds them; a tape runs before the arms that replay it."""
    results: dict[str, StoredRun | Failure] = {}
    jobs: dict[str, Job] = {}
    for arm in arms:
        if arm.job.key in results or arm.job.key in jobs:
            continue
        stored = store.get(arm.job.key)
        if stored is not None:
            results[arm.job.key] = stored
            continue
        after = () if arm.job.tape is None or arm.job.tape in results else (arm.job.tape,)
        jobs[arm.job.key] = Job(
            key=arm.job.key,
            label=arm.label,
            payload=arm.job,
            after=after,
            fresh=arm.job.spec.engine == "deepspeed",
            weight=float(arm.job.spec.steps),
        )
    results.update(
        run_jobs(run_arm, list(jobs.values()), workers=workers, preload=("harness.rl.preload",), progress=progress)
    )
    return results


def arm_set(
    model: str, runs: tuple[tuple[Arm, StoredRun], ...], fault: FaultSpec, condition: Condition = "faulted"
) -> ArmSet:
    """Collect one model's traces for the comparison; ``condition`` is ``faulted`` or ``remedied``."""
    from harness.fidelity import ArmSet

    by = {(a.condition, a.seed): r for a, r in runs if a.model == model}
    seeds = sorted({seed for _, seed in by})
    clean = {s: by["clean", s] for s in seeds}
    return ArmSet(
        clean={s: r.trace() for s, r in clean.items()},
        faulted={s: by[condition, s].trace() for s in seeds},
        null={s: by["null", s].trace() for s in seeds},
        fired={
            s: fired(fault, by["faulted", s], clean[s]) if condition == "faulted" else by[condition, s].fired
            for s in seeds
        },
    )


def twin_difference(runs: tuple[tuple[Arm, StoredRun], ...]) -> str | None:
    """Say where a second clean run differs from the first; None if none does, or none was asked for."""
    clean = {(a.model, a.seed): r for a, r in runs if a.condition == "clean"}
    for arm, twin in runs:
        if arm.condition == "twin" and twin.digest != clean[arm.model, arm.seed].digest:
            found = first_difference(clean[arm.model, arm.seed].trace(), twin.trace())
            where = f"{found[1]} at step {found[0]}" if found else "their digests"
            who = f"two clean runs of the {arm.model} at seed {arm.seed}"
            return f"{who} differ in {where}, so no difference means anything"
    return None


def fired(fault: FaultSpec, faulted: StoredRun, clean: StoredRun) -> int:
    """Return the number of steps in which the fault acted.

    A configuration fault acted, in every step, if the component's effective setting is not the clean run's.
    """
    if not isinstance(fault.seam, Config):
        return faulted.fired
    key = fault.seam.key
    changed = faulted.sidecar["effective"].get(key) != clean.sidecar["effective"].get(key)
    return len(faulted.trace()) if changed else 0


HALVINGS = 16  # the search goes down to the fault's severity / 2^16


def severity_to_trip(
    request: Request,
    probe: Callable[[str, float], Arm],
    run: Callable[[list[Arm]], dict[str, StoredRun | Failure]],
) -> dict[str, float | None] | None:
    """Find the smallest severity at which a threshold fault's non-finite claim comes true, to half an octave.

    Bisection, both models side by side; it takes for granted that a severity above one that trips trips as well.

    Args:
        request: The experiment; its own severity is the largest that is tried.
        probe: Plans a short run of a model at a severity.
        run: Runs planned arms.

    Returns:
        Severity by model, None where even the full one does not trip or a run failed; None for other faults.
    """
    fault = find(request.fault.name)
    metrics = [c.metric for c in fault.expects if isinstance(c, NonFinite)]
    reached = request.fault.schedule.onset < request.pair.steps
    if not fault.threshold or not metrics or fault.severity is None or not reached:
        return None
    full = float(dict(request.fault.options)[fault.severity])
    bounds = {model: [-1, 2 * HALVINGS + 1] for model in ("original", "proxy")}  # half-octaves below: trips, does not
    while todo := {m: (low + high) // 2 for m, (low, high) in bounds.items() if high - low > 1}:
        arms = {m: probe(m, full * 2.0 ** (-half / 2)) for m, half in todo.items()}
        results = run(list(arms.values()))
        for model, half in todo.items():
            result = results[arms[model].job.key]
            tripped = isinstance(result, StoredRun) and trips(result, metrics)
            bounds[model][0 if tripped else 1] = half
    return {m: None if low < 0 else full * 2.0 ** (-low / 2) for m, (low, _) in bounds.items()}


def trips(run: StoredRun, metrics: list[str]) -> bool:
    """Say whether any of the metrics is not finite anywhere in a run."""
    import math

    trace = run.trace()
    return any(v is not None and not math.isfinite(v) for m in metrics for v in trace.column(m))
