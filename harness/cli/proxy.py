"""``harness proxy``: make a proxy from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.common import Json, check_file, check_folder, clean_stdout, interruptible, write_json
from harness.cli.progress import Progress, progress
from harness.errors import UsageError, unknown

if TYPE_CHECKING:
    from harness.pairs import Progress as Report

app = typer.Typer(no_args_is_help=True, help="Build expert-pruned proxies.")


@app.callback()
def _proxy() -> None:
    """Build expert-pruned proxies."""


@app.command("build")
def build(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint folder, or the name of an original.")],
    experts: Annotated[int, typer.Option("--experts", min=1, help="Experts to keep per layer.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to make.")],
    strategy: Annotated[str, typer.Option("--strategy", help="Selection strategy.")] = "facility",
    sequences: Annotated[int, typer.Option("--sequences", min=1, help="Calibration sequences.")] = 512,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    json: Json = None,
) -> None:
    """Keep some experts of every layer, chosen by what they do on calibration text."""
    check_folder(out.absolute().parent)
    check_file(json)
    with interruptible(), clean_stdout(), progress(quiet=quiet) as shown:
        manifest = _build(source, experts, out, strategy, sequences, shown)
    if json is not None:
        write_json(manifest, json)
    if json != "-":
        counts = manifest["parameters"]
        typer.echo(f"{out.absolute()}: {experts} experts per layer, chosen by {strategy}")
        typer.echo(f"parameters: {counts['proxy']:,} of {counts['original']:,}")


def _build(source: str, experts: int, out: Path, strategy: str, sequences: int, shown: Progress) -> dict[str, Any]:
    from harness.pairs import calibration
    from harness.spec import TaskSpec
    from proxies.build import build as build_proxy
    from proxies.checkpoint import CheckpointError
    from proxies.select import strategy as check_strategy
    from proxies.verify import check_loadable

    try:
        check_strategy(strategy)
        folder = _folder(source, shown.prepare)
        check_loadable(folder)
        batches = calibration(folder, TaskSpec(), sequences)
        return build_proxy(folder, out, experts, batches, strategy_name=strategy, progress=shown.prepare)
    except CheckpointError as e:
        raise UsageError(str(e)) from e


def _folder(source: str, report: Report) -> Path:
    from harness.rl.originals import ensure_original, recipe_names
    from harness.store import harness_home

    if Path(source).exists() or "/" in source:
        return Path(source)
    if source not in recipe_names():
        raise unknown("checkpoint folder or original", source, recipe_names())
    return ensure_original(source, harness_home(), lambda step, total, _: report("training the original", step, total))
