"""``harness proxy compare-strategies``: how much ability every selection strategy keeps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.cli.common import Json, check_file, clean_stdout, interruptible, write_json
from harness.cli.progress import progress
from harness.cli.proxy_common import Quiet, Source, folder_of, sentences


def compare_strategies(
    source: Source,
    experts: Annotated[list[int], typer.Option("--experts", min=1, help="Experts to keep per layer; repeatable.")],
    strategy: Annotated[list[str] | None, typer.Option("--strategy", help="Default: all; repeatable.")] = None,
    draws: Annotated[int, typer.Option("--draws", min=1, help="Calibration draws.")] = 3,
    sequences: Annotated[int, typer.Option("--sequences", min=1, help="Calibration sequences per draw.")] = 512,
    problems: Annotated[int, typer.Option("--problems", min=1, help="Problems of the score, greedy answers.")] = 512,
    budget: Annotated[float, typer.Option("--budget", min=0, help="Seconds after which no cell is begun.")] = math.inf,
    log: Annotated[
        Path | None, typer.Option("--log", help="Finished cells, as JSON lines; goes on from there.")
    ] = None,
    quiet: Quiet = False,
    json: Json = None,
) -> None:
    """Score the selections of every strategy on the character tasks: mean and spread over calibration draws.

    Nothing is written but the log: experts are cut in memory. `above random` is (score - random) / (original - random).
    """
    check_file(json)
    with interruptible(), sentences(), clean_stdout(), progress(quiet=quiet) as shown:
        cells = _cells(source, experts, strategy, draws, sequences, problems, budget, log, shown)
    from proxies.compare import ORIGINAL, table

    rows = table(cells)
    original = next((cell.score for cell in cells if cell.strategy == ORIGINAL), None)
    if json is not None:
        plain = [{k: v for k, v in vars(row).items() if k != "refused" or v} for row in rows]
        write_json({"schema": "harness/proxy-strategies@1", "original": original, "rows": plain}, json)
    if json != "-":
        _show(rows, original)


def _cells(
    source: str,
    experts: list[int],
    names: list[str] | None,
    draws: int,
    sequences: int,
    problems: int,
    budget: float,
    log: Path | None,
    shown: Any,
) -> list[Any]:
    import torch

    from harness.calibration import load_tokenizer
    from harness.rl import ability
    from harness.rl.policy import Policy
    from harness.rl.tasks import calibration_batches
    from harness.spec import TaskSpec
    from proxies.compare import compare
    from proxies.select import strategies, strategy
    from proxies.verify import check_loadable

    for name in names or ():
        strategy(name)
    folder = folder_of(source, shown.prepare)
    check_loadable(folder)
    tokenizer = load_tokenizer(folder)
    torch.set_num_threads(1)
    texts = [calibration_batches(TaskSpec(), tokenizer, sequences, seed=draw) for draw in range(draws)]
    chosen = names or list(strategies())
    total, done = 1 + len(set(experts)) * len(chosen) * draws, 0

    def score(model: Any) -> float:
        return ability.score(Policy(model), tokenizer, TaskSpec(), 0.0, n=problems).exact

    def tell(_cell: Any) -> None:
        nonlocal done
        done += 1
        shown.prepare("scoring selections", done, total)

    return compare(folder, chosen, experts, texts, score, log=log, budget=budget, progress=tell)


def _show(rows: list[Any], original: float | None) -> None:
    from rich.console import Console
    from rich.table import Table

    title = "exact match" if original is None else f"exact match (original {original:.3f})"
    table = Table(title=title)
    for name in ("kept", "strategy", "mean", "spread", "above random", "draws"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for row in rows:
        if row.scores:
            above = "" if math.isnan(row.above) else f"{row.above:.2f}"
            spread = "" if math.isnan(row.spread) else f"{row.spread:.3f}"
            table.add_row(str(row.experts), row.strategy, f"{row.mean:.3f}", spread, above, str(len(row.scores)))
        else:
            table.add_row(str(row.experts), row.strategy, "refused", "", "", "0")
    Console().print(table)
    for reason in sorted({row.refused for row in rows if row.refused}):
        typer.echo(f"refused: {reason}", err=True)
