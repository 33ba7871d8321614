"""``harness proxy``: make a proxy from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.common import Json, progress, write_json
from harness.errors import UsageError

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
    from harness.store import harness_home
    from proxies.build import build as build_proxy
    from proxies.checkpoint import CheckpointError
    from proxies.select import strategy as check_strategy
    from proxies.verify import check_loadable

    with progress(quiet=quiet) as shown:
        try:
            check_strategy(strategy)
            folder = _folder(source, harness_home(), shown.prepare)
            check_loadable(folder)
            from transformers import AutoTokenizer

            from harness.rl.tasks import calibration_batches
            from harness.spec import TaskSpec

            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            batches = calibration_batches(TaskSpec(), tokenizer, sequences, seed=0)
            manifest = build_proxy(folder, out, experts, batches, strategy_name=strategy, progress=shown.prepare)
        except CheckpointError as e:
            raise UsageError(str(e)) from e
    if json is not None:
        write_json(manifest, json)
    if json != "-":
        counts = manifest["parameters"]
        typer.echo(f"{out.absolute()}: {experts} experts per layer, chosen by {strategy}")
        typer.echo(f"parameters: {counts['proxy']:,} of {counts['original']:,}")


def _folder(source: str, home: Path, shown: object) -> Path:
    from harness.rl.originals import ensure_original, recipe_names

    if Path(source).exists() or source not in recipe_names():
        return Path(source)
    return ensure_original(source, home, lambda step, total, _: shown("training the original", step, total))  # type: ignore[operator]
