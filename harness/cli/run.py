"""``harness run``: one fault, one pair, one verdict."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from harness.cli.common import (
    Json,
    check_file,
    check_folder,
    clean_stdout,
    interruptible,
    merged,
    parse_settings,
    write_json,
)
from harness.cli.progress import progress
from harness.errors import HarnessError, UsageError, unknown

if TYPE_CHECKING:
    from harness.catalogue import FaultSpec
    from harness.experiment import Experiment
    from harness.fidelity import Thresholds
    from harness.plan import Request
    from harness.seams import Schedule
    from harness.tracking import TrackingRef

EXIT = {"REPRODUCED": 0, "CRASHED": 3, "INCONCLUSIVE": 4}  # every other verdict: 1
SCHEDULE = {"onset": 0, "until": None, "every": 1}  # keys of --set schedule, and what a configuration fault has


def run(
    ctx: typer.Context,
    fault: Annotated[str, typer.Option("--fault", help="Name of the fault; see `harness faults list`.")],
    pair: Annotated[str, typer.Option("--pair", help="Name of a pair, or a YAML file.")] = "tiny-qwen3-moe",
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="Number of seeds.")] = None,
    seed_start: Annotated[int, typer.Option("--seed-start", min=0, help="First seed.")] = 0,
    steps: Annotated[int | None, typer.Option("--steps", min=2, help="Steps of an arm.")] = None,
    onset: Annotated[int | None, typer.Option("--onset", min=0, help="Step at which the fault wakes.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="GROUP.KEY=VALUE",
            help="KEY of rl or schedule, OPTION of fault or remedy.",
        ),
    ] = None,
    mode: Annotated[Literal["replay", "free"] | None, typer.Option("--mode", help="Default: the fault's.")] = None,
    engine: Annotated[
        Literal["torch", "deepspeed"] | None, typer.Option("--engine", help="Default: the one that the fault needs.")
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Worker processes; default: CPUs.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the report and the JSON.")] = None,
    remedy: Annotated[
        str | None, typer.Option("--remedy", help="Also run fault and remedy together; is the clean response restored?")
    ] = None,
    until_decided: Annotated[
        bool, typer.Option("--until-decided", help="Add seeds one by one while the verdict is INCONCLUSIVE.")
    ] = False,
    max_seeds: Annotated[int, typer.Option("--max-seeds", min=1, help="Where --until-decided gives up.")] = 12,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    json: Json = None,
) -> None:
    """Run a fault on an original and its proxy, and say whether the proxy reproduces it.

    Exit status: 0 REPRODUCED; 1 PARTIAL, NOT_REPRODUCED, NO_EFFECT or VOID; 2 usage; 3 CRASHED or environment;
    4 INCONCLUSIVE; 130 interrupted.
    """
    request = build_request(fault, pair, seeds, seed_start, steps, onset, settings or [], mode, engine, remedy)
    folder = (out or Path("out") / f"{fault}-{request.pair.name}-{request.mode}").absolute()
    check_folder(folder)
    check_file(json)
    from harness.cli import render
    from harness.experiment import reproduce
    from harness.sequential import until_decided as decide
    from harness.store import harness_home

    home, report = harness_home(), folder / "report.html"
    with interruptible(), clean_stdout():
        with progress(quiet=quiet) as shown:

            def once(asked: Request, thresholds: Thresholds | None = None) -> Experiment:
                return reproduce(
                    asked,
                    home,
                    workers=workers or usable_cpus(),
                    prepare_progress=shown.prepare,
                    arm_progress=shown.arm,
                    thresholds=thresholds,
                )

            experiment = decide(request, max_seeds, once) if until_decided else once(request)
        tracking = publish(experiment, home, report)
    data = render.to_json(experiment, report, tracking)
    if json is not None:
        write_json(data, json)
    if json != "-":
        render.show(experiment, report, tracking)
    render.show_failures(experiment, debug=bool(ctx.obj))
    raise typer.Exit(EXIT.get(experiment.verdict, 1))


def usable_cpus() -> int:
    """Number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build_request(
    fault: str,
    pair: str,
    seeds: int | None,
    seed_start: int,
    steps: int | None,
    onset: int | None,
    settings: list[str],
    mode: Literal["replay", "free"] | None,
    engine: Literal["torch", "deepspeed"] | None,
    remedy: str | None = None,
) -> Request:
    """Turn the words of the command line into a request.

    Raises:
        UsageError: If a name, an option or a number does not fit.
    """
    from harness.catalogue import find, find_remedy
    from harness.plan import Request
    from harness.spec import PairSpec, load_pair, validate

    spec = find(fault)
    given = parse_settings(settings, ("fault", "rl", "schedule", "remedy"))
    cure = None if remedy is None else find_remedy(remedy)
    if cure is None and given["remedy"]:
        raise UsageError("--set remedy. needs --remedy NAME; harness faults remedies lists them")
    base = load_pair(pair)
    count = base.seeds if seeds is None else seeds
    length = base.steps if steps is None else steps
    schedule = build_schedule(spec, base.onset, onset, length, given["schedule"])
    changes = {
        "rl": merged(base.rl.model_dump(), given["rl"]),
        "steps": length,
        "onset": min(max(schedule.onset, 1), length - 1),  # a fault may sleep for ever; the pair's onset may not
    }
    return Request(
        pair=validate(PairSpec, {**base.model_dump(), **changes}, f"pair {base.name} with --set, --steps and --onset"),
        fault=spec.ref(fault_options(spec, given["fault"]), schedule),
        mode=mode or spec.mode,
        engine=engine or ("deepspeed" if spec.engine == "deepspeed" else "torch"),
        seeds=tuple(range(seed_start, seed_start + count)),
        remedy=None if cure is None else cure.ref(given["remedy"], schedule),
    )


def fault_options(spec: FaultSpec, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options given with ``--set fault.``, ``severity`` replaced by the option that it stands for.

    Raises:
        UsageError: If the fault has no severity, or it is given under both of its names.
    """
    options = dict(given)
    if "severity" not in options or "severity" in spec.defaults:
        return options
    if spec.severity is None:
        raise UsageError(f"fault {spec.name} has no severity; its options: {', '.join(spec.defaults) or 'none'}")
    if spec.severity in options:
        raise UsageError(f"fault.severity and fault.{spec.severity} are one option of fault {spec.name}; give one")
    options[spec.severity] = options.pop("severity")
    return options


def build_schedule(spec: FaultSpec, usual: int, asked: int | None, steps: int, given: dict[str, Any]) -> Schedule:
    """Return when the fault is awake.

    Args:
        spec: The fault; one that rewrites the configuration acts from the first step on and has no schedule.
        usual: The pair's onset.
        asked: The onset of ``--onset``; it may lie beyond the last step.
        steps: Steps of an arm.
        given: ``--set schedule.``

    Raises:
        UsageError: If a key or a value does not fit, or nobody asked for an onset and the pair's is too late.
    """
    from harness.seams import Schedule

    for key, value in given.items():
        if key not in SCHEDULE:
            raise unknown("key in --set schedule:", key, SCHEDULE)
        if type(value) is not int and not (key == "until" and value is None):
            raise UsageError(f"--set schedule.{key} must be a whole number, got {value!r}")
    if spec.config:
        if asked or any(given.get(key, fixed) != fixed for key, fixed in SCHEDULE.items()):
            raise UsageError(
                f"fault {spec.name} rewrites the configuration before the first step; it has no other onset or schedule"
            )
        return Schedule(0)
    onset = given.get("onset", asked)
    if onset is None and usual >= steps:
        raise UsageError(f"with --steps {steps} the pair's onset {usual} is never reached; add --onset")
    try:
        return Schedule(**{"onset": usual if onset is None else onset, **given})
    except ValueError as e:
        raise UsageError(f"--set schedule: {e}") from None


def publish(experiment: Experiment, home: Path, report: Path) -> TrackingRef | None:
    """Write report and JSON, then log to MLflow: a server that does not answer costs a warning, not the result."""
    from harness.cli import render
    from harness.report import write_report
    from harness.tracking import log_experiment

    target = str(report.with_name("fidelity.json"))
    write_report(experiment, report)
    write_json(render.to_json(experiment, report, None), target)
    request = experiment.request
    try:
        tracking = log_experiment(
            home,
            experiment=f"harness/{request.pair.name}",
            name=f"{request.fault.name} {request.mode}",
            tags=render.tags(experiment),
            params={"fault": request.fault.to_dict(), "seeds": request.seeds, "rl": request.pair.rl.model_dump_json()},
            metrics=render.numbers(experiment),
            arms=render.arms(experiment),
            artifacts=[report],
            note=f"**{experiment.verdict}**: {experiment.reason}\n",
        )
    except Exception as e:  # whatever happens to the log, the result is there
        sentence = str(e) if isinstance(e, HarnessError) else f"MLflow logging failed: {type(e).__name__}: {e}"
        typer.echo(f"harness: warning: {' '.join(sentence.split())}; the result is in {report.parent}", err=True)
        return None
    write_report(experiment, report, tracking=tracking)
    write_json(render.to_json(experiment, report, tracking), target)
    return tracking
