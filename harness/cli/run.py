"""``harness run``: one fault, one pair, one verdict."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from harness.cli.common import Json, parse_settings, progress, write_json, write_text
from harness.errors import HarnessError, UsageError

if TYPE_CHECKING:
    from harness.experiment import Experiment
    from harness.plan import Request
    from harness.tracking import TrackingRef

EXIT = {"REPRODUCED": 0, "CRASHED": 3, "INCONCLUSIVE": 4}  # every other verdict: 1


def run(
    fault: Annotated[str, typer.Option("--fault", help="Name of the fault; see `harness faults list`.")],
    pair: Annotated[str, typer.Option("--pair", help="Name of a pair, or a YAML file.")] = "tiny-qwen3-moe",
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="Number of seeds.")] = None,
    seed_start: Annotated[int, typer.Option("--seed-start", min=0, help="First seed.")] = 0,
    steps: Annotated[int | None, typer.Option("--steps", min=2, help="Steps of an arm.")] = None,
    onset: Annotated[int | None, typer.Option("--onset", min=0, help="Step at which the fault wakes.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="GROUP.KEY=VALUE", help="fault.OPTION, fault.severity, rl.KEY or schedule.KEY."),
    ] = None,
    mode: Annotated[Literal["replay", "free"] | None, typer.Option("--mode", help="Default: the fault's.")] = None,
    engine: Annotated[
        Literal["torch", "deepspeed"] | None, typer.Option("--engine", help="Default: the one that the fault needs.")
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Worker processes; default: CPUs.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the report and the JSON.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    json: Json = None,
) -> None:
    """Run a fault on an original and its proxy, and say whether the proxy reproduces it.

    Exit status: 0 REPRODUCED; 1 PARTIAL, NOT_REPRODUCED, NO_EFFECT or VOID; 2 usage; 3 CRASHED or environment;
    4 INCONCLUSIVE; 130 interrupted.
    """
    request = build_request(fault, pair, seeds, seed_start, steps, onset, settings or [], mode, engine)
    from harness.cli import render
    from harness.experiment import reproduce
    from harness.store import harness_home

    home = harness_home()
    folder = (out or Path("out") / f"{fault}-{request.pair.name}-{request.mode}").absolute()
    with progress(quiet=quiet) as shown:
        experiment = reproduce(
            request,
            home,
            workers=workers or len(os.sched_getaffinity(0)),
            prepare_progress=shown.prepare,
            arm_progress=shown.arm,
        )
    report = folder / "report.html"
    tracking = publish(experiment, home, report)
    data = render.to_json(experiment, report, tracking)
    write_json(data, str(folder / "fidelity.json"))
    if json is not None:
        write_json(data, json)
    if json != "-":
        render.show(experiment, report, tracking)
    raise typer.Exit(EXIT.get(experiment.verdict, 1))


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
) -> Request:
    """Turn the words of the command line into a request.

    Raises:
        UsageError: If a name, an option or a number does not fit.
    """
    from harness.catalogue import find
    from harness.plan import Request
    from harness.seams import Schedule
    from harness.spec import PairSpec, load_pair, validate

    spec = find(fault)
    given = parse_settings(settings, ("fault", "rl", "schedule"))
    base = load_pair(pair)
    changes: dict[str, Any] = {"rl": {**base.rl.model_dump(), **given["rl"]}}
    changes["steps"] = base.steps if steps is None else steps
    asked = base.onset if onset is None else onset
    changes["onset"] = min(max(asked, 1), changes["steps"] - 1)
    changed = validate(PairSpec, {**base.model_dump(), **changes}, f"pair {base.name} with --set, --steps and --onset")
    options = dict(given["fault"])
    if "severity" in options and "severity" not in spec.defaults:
        if spec.severity is None:
            raise UsageError(f"fault {fault} has no severity; its options: {', '.join(spec.defaults) or 'none'}")
        options[spec.severity] = options.pop("severity")
    try:
        schedule = Schedule(**{"onset": 0 if spec.config else asked, **given["schedule"]})
    except (TypeError, ValueError) as e:
        raise UsageError(f"--set schedule: {e}; the keys are onset, until and every") from None
    count = base.seeds if seeds is None else seeds
    return Request(
        pair=changed,
        fault=spec.ref(options, schedule),
        mode=mode or spec.mode,
        engine=engine or ("deepspeed" if spec.engine == "deepspeed" else "torch"),
        seeds=tuple(range(seed_start, seed_start + count)),
    )


def publish(experiment: Experiment, home: Path, report: Path) -> TrackingRef | None:
    """Log to MLflow and write the report; a tracking server that does not answer costs a warning, not the result."""
    from harness.cli import render
    from harness.report import write_report
    from harness.tracking import TrackedArm, log_experiment

    request = experiment.request
    tags = {
        "fault": request.fault.name,
        "pair": request.pair.name,
        "mode": request.mode,
        "engine": request.engine,
        "verdict": experiment.verdict,
        **{f"version.{name}": value for name, value in experiment.versions.items()},
    }
    write_report(experiment, report)
    facts = render.numbers(experiment)
    path = report.with_name("reason.md")
    write_text(path, f"**{experiment.verdict}**: {experiment.reason}\n")
    arms = [
        TrackedArm(
            label=arm.label,
            tags={"arm": f"{arm.model}/{arm.condition}", "seed": str(arm.seed)},
            trace=stored.trace(),
            trace_path=stored.trace_path,
            metrics={f"cost/{k}": float(v) for k, v in stored.sidecar.items() if isinstance(v, (int, float))},
        )
        for arm, stored in experiment.runs
    ]
    try:
        tracking = log_experiment(
            home,
            experiment=f"harness/{request.pair.name}",
            name=f"{request.fault.name} {request.mode}",
            tags=tags,
            params={"fault": request.fault.to_dict(), "seeds": request.seeds, "rl": request.pair.rl.model_dump_json()},
            metrics=facts,
            arms=arms,
            artifacts=[report],
            note=path.read_text(encoding="utf-8"),
        )
    except HarnessError as e:
        typer.echo(f"harness: warning: {e}; the result is in {report.parent}", err=True)
        return None
    finally:
        path.unlink(missing_ok=True)
    write_report(experiment, report, tracking=tracking)
    return tracking
