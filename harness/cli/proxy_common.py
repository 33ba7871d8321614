"""What the commands of ``harness proxy`` share: their options, calibration text, and errors for people."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.errors import HarnessError, UsageError, unknown

if TYPE_CHECKING:
    from harness.pairs import Progress as Report

Source = Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint folder, or the name of an original.")]
Calibration = Annotated[
    str,
    typer.Option(
        "--calibration",
        metavar="FILE.jsonl|task[:NAME]|random|none",
        help="Text that the experts are watched on; none selects by the weights alone.",
    ),
]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Calibration tokens, about.")]
Budget = Annotated[
    float | None,
    typer.Option("--budget-gb", min=0, help="Memory for hidden states while profiling; the rest waits on disk."),
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="Profile in bf16 or fp32; default: the checkpoint's own.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]


@contextmanager
def sentences() -> Iterator[None]:
    """Turn what the builder raises into errors for people."""
    from proxies.checkpoint import CheckpointError

    try:
        yield
    except CheckpointError as e:
        raise UsageError(str(e)) from e
    except OSError as e:
        where = f"{e.filename}: " if e.filename else ""
        raise HarnessError(
            f"{where}{e.strerror}; what was finished is kept, the same command goes on from there"
        ) from e


def small_caches() -> None:
    """Keep peak memory flat over layers; has to come before torch multiplies its first matrices."""
    from proxies.layerwise import CACHES

    for name, value in CACHES.items():
        os.environ.setdefault(name, value)


def batches_of(folder: Path, calibration: str, tokens: int) -> Any:
    """Return the calibration batches that ``--calibration`` and ``--tokens`` ask for; None for ``none``."""
    from harness.calibration import calibration as make

    return make(folder, calibration, tokens)


def folder_of(source: str, report: Report) -> Path:
    """Return the checkpoint folder that ``SRC`` means; an original that is named is trained if it is not cached."""
    from harness.rl.originals import ensure_original, recipe_names
    from harness.store import harness_home

    if Path(source).exists() or "/" in source:
        return Path(source)
    if source not in recipe_names():
        raise unknown("checkpoint folder or original", source, recipe_names())
    return ensure_original(source, harness_home(), lambda step, total, _: report("training the original", step, total))
