"""The ability table: every strategy at several sizes and calibration draws, scored by a caller's own measure."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from proxies.checkpoint import CheckpointError, checkpoint_digest
from proxies.profile import Batches, Profile, calibration_digest, profile
from proxies.pruned import PrunedModel
from proxies.search import SearchContext, load_model
from proxies.select import needs_outputs, searches, select, strategy

ORIGINAL, FLOOR = "original", "random"


@dataclass(frozen=True)
class Cell:
    """One selection, scored.

    Attributes:
        source: digest of the original checkpoint.
        experts: experts kept per layer; 0 for the original.
        strategy: selection strategy; `original` for the whole model.
        draw: number of the calibration draw, which also seeds the strategy.
        calibration: digest of the calibration text; empty for the original.
        score: ability, or None if the selection was refused.
        seconds: time of the selection, without the profile.
        evaluations: divergences that a search measured.
        refused: why there is no score.
    """

    source: str
    experts: int
    strategy: str
    draw: int
    calibration: str
    score: float | None
    seconds: float
    evaluations: int = 0
    refused: str = ""

    @property
    def key(self) -> tuple[str, int, str, int, str]:
        """What the result depends on."""
        return self.source, self.experts, self.strategy, self.draw, self.calibration


def compare(
    folder: Path,
    strategies: Sequence[str],
    keeps: Sequence[int],
    draws: Sequence[Batches],
    score: Callable[[Any], float],
    *,
    log: Path | None = None,
    budget: float = math.inf,
    progress: Callable[[Cell], None] = lambda _cell: None,
) -> list[Cell]:
    """Score strategies, with their default options, on one original; experts are cut in memory, nothing is written.

    Args:
        folder: checkpoint folder of the original.
        strategies: names of strategies.
        keeps: experts per layer.
        draws: calibration text, once per draw.
        score: gives the ability of a model in memory, 0 to 1.
        log: JSON lines; cells that are there already are not measured again, new ones are added as they are made.
        budget: seconds after which no further cell is begun.
        progress: called with every cell.

    Returns:
        Cells, those of earlier runs included; the first is the original's.

    Raises:
        CheckpointError: an unknown strategy, or a checkpoint or text that cannot be used.
    """
    started = time.monotonic()
    for name in strategies:
        strategy(name)
    known = {} if log is None else {cell.key: cell for cell in read_log(log)}
    bench = _Bench(folder, draws, score, outputs=any(needs_outputs(name) for name in strategies))
    keys = [(bench.source, 0, ORIGINAL, 0, "")]
    for keep in keeps:
        for draw, batches in enumerate(draws):
            keys += [(bench.source, keep, name, draw, calibration_digest(batches)) for name in strategies]
    cells = []
    for key in keys:
        if key not in known:
            if time.monotonic() - started > budget:
                continue
            known[key] = bench.measure(*key)
            if log is not None:
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(known[key])) + "\n")
        cells.append(known[key])
        progress(known[key])
    return cells


class _Bench:
    """One original in memory, and a profile of it per draw, taken when it is first needed."""

    def __init__(self, folder: Path, draws: Sequence[Batches], score: Callable[[Any], float], *, outputs: bool) -> None:
        self.source = checkpoint_digest(folder)
        self._folder, self._draws, self._score, self._outputs = folder, draws, score, outputs
        model, family = load_model(folder)
        self._pruned, self._groups = PrunedModel(model, family), family.groups(model.config.to_dict())
        self._top = family.group_top
        self._profiles: dict[int, Profile] = {}

    def measure(self, source: str, keep: int, name: str, draw: int, calibration: str) -> Cell:
        """Select and score."""
        if name == ORIGINAL:
            self._pruned.keep({})
            return Cell(source, keep, name, draw, calibration, self._score(self._pruned.model), 0.0)
        batches = self._draws[draw]
        if draw not in self._profiles:
            self._profiles[draw] = profile(self._folder, batches, outputs=self._outputs)
        context = SearchContext(self._profiles[draw], self._pruned, batches, groups=self._groups)
        begun = time.monotonic()
        try:
            kept = select(
                self._profiles[draw],
                keep,
                name,
                seed=draw,
                groups=self._groups,
                group_top=self._top,
                context=lambda: context,
            )
        except CheckpointError as e:
            return Cell(source, keep, name, draw, calibration, None, 0.0, refused=str(e))
        seconds = time.monotonic() - begun
        self._pruned.keep(kept)
        found = self._score(self._pruned.model)
        self._pruned.keep({})
        count = context.evaluations if searches(name) else 0
        return Cell(source, keep, name, draw, calibration, found, round(seconds, 3), count)


def read_log(path: Path) -> list[Cell]:
    """Cells of a log, none if there is no such file.

    Raises:
        CheckpointError: a line that `compare` did not write; one cut short at the end is left out.
    """
    if not path.exists():
        return []
    cells = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            if line:
                cells.append(Cell(**json.loads(line)))
        except (ValueError, TypeError) as e:  # noqa: PERF203 - each line may be damaged
            if number < len(lines):
                raise CheckpointError(f"{path}, line {number} is not a result of a comparison: {e}.") from e
    return cells


@dataclass(frozen=True)
class Row:
    """One strategy at one size over the draws.

    Attributes:
        experts: experts kept per layer.
        strategy: selection strategy.
        scores: ability per draw.
        mean: of `scores`.
        spread: sample standard deviation of `scores`; NaN for one draw.
        above: (mean - random) / (original - random), with the mean of the random selections of that size; NaN where
            it is not known or the original is no better than random.
        refused: why there are no scores.
    """

    experts: int
    strategy: str
    scores: tuple[float, ...]
    mean: float
    spread: float
    above: float
    refused: str = ""


def table(cells: Iterable[Cell]) -> list[Row]:
    """Summarise cells of one original, sizes from large to small, strategies from best to worst."""
    scores: dict[tuple[int, str], list[float]] = {}
    refused: dict[tuple[int, str], str] = {}
    for cell in cells:
        if cell.score is None:
            refused[cell.experts, cell.strategy] = cell.refused
        else:
            scores.setdefault((cell.experts, cell.strategy), []).append(cell.score)
    means = {key: statistics.fmean(found) for key, found in scores.items()}
    original = means.get((0, ORIGINAL), math.nan)
    rows = []
    for (experts, name), found in scores.items():
        if name == ORIGINAL:
            continue
        floor = means.get((experts, FLOOR), math.nan)
        above = (means[experts, name] - floor) / (original - floor) if original > floor else math.nan
        spread = statistics.stdev(found) if len(found) > 1 else math.nan
        rows.append(Row(experts, name, tuple(found), means[experts, name], spread, above))
    rows += [
        Row(e, n, (), math.nan, math.nan, math.nan, why) for (e, n), why in refused.items() if (e, n) not in scores
    ]
    return sorted(rows, key=lambda row: (-row.experts, -row.mean if row.scores else 1.0, row.strategy))
