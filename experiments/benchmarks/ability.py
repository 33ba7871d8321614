"""Ability kept by every selection strategy: originals x sizes x calibration draws, as a table.

``python -m experiments.benchmarks.ability --original tiny-qwen3-moe`` trains the original if it is not cached. Results
are written to a file of JSON lines as they are made, and a second call goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import logging
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proxies.compare import Cell

SHARES = (2, 4, 8, 16)


def run(name: str, arguments: argparse.Namespace, shares: list[int]) -> list[Cell]:
    """Measure one original, named or a folder."""
    from transformers import AutoTokenizer

    from harness.rl import ability
    from harness.rl.originals import ensure_original
    from harness.rl.policy import Policy
    from harness.rl.tasks import calibration_batches
    from harness.spec import TaskSpec
    from harness.store import harness_home
    from proxies.checkpoint import Checkpoint
    from proxies.compare import compare
    from proxies.families import family_of_config

    folder = Path(name) if Path(name).is_dir() else ensure_original(name, harness_home())
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config = Checkpoint.open(folder).config
    experts = family_of_config(config).experts(config)
    draws = [
        calibration_batches(TaskSpec(), tokenizer, arguments.sequences, seed=draw) for draw in range(arguments.draws)
    ]

    def score(model: Any) -> float:
        return ability.score(Policy(model), tokenizer, TaskSpec(), 0.0, n=arguments.problems).exact

    def show(cell: Cell) -> None:
        found = cell.refused if cell.score is None else f"{cell.score:.3f}"
        print(f"{cell.experts:4} {cell.strategy:16} draw {cell.draw}: {found} ({cell.seconds:.1f} s)", flush=True)

    keeps = [experts // share for share in shares]
    return compare(
        folder, arguments.strategies, keeps, draws, score, log=arguments.log, budget=arguments.budget, progress=show
    )


def show_table(name: str, cells: list[Cell]) -> None:
    """Print a Markdown table."""
    from proxies.compare import ORIGINAL, table

    whole = [cell.score for cell in cells if cell.strategy == ORIGINAL]
    print(f"\n{name}: original {whole[0] if whole else math.nan:.3f}\n")
    print("| kept | strategy | exact match | spread | above random | draws |")
    print("|---|---|---|---|---|---|")
    for row in table(cells):
        if row.scores:
            numbers = f"{row.mean:.3f} | {row.spread:.3f} | {row.above:.2f} | {len(row.scores)}"
        else:
            numbers = f"refused: {row.refused} | | |"
        print(f"| {row.experts} | {row.strategy} | {numbers} |")


def main() -> None:
    """Run and print."""
    from proxies.select import strategies

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--original", action="append", help="name of an original, or a checkpoint folder; repeatable")
    parser.add_argument("--shares", nargs="+", type=int, default=list(SHARES), help="keep 1/N of the experts")
    parser.add_argument("--strategies", nargs="+", default=list(strategies()))
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=512, help="calibration sequences per draw")
    parser.add_argument("--problems", type=int, default=512, help="problems of the ability score, greedy answers")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds per original")
    parser.add_argument("--log", type=Path, default=Path("ability.jsonl"), help="results as JSON lines")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch

    torch.set_num_threads(1)
    for name in arguments.original or ["tiny-qwen3-moe", "tiny-deepseek-v3"]:
        show_table(name, run(name, arguments, arguments.shares))


if __name__ == "__main__":
    main()
