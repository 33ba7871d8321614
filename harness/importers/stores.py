"""Runs that are kept in a store and not in one text: TensorBoard event files, MLflow runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from harness.errors import UsageError
from harness.importers.base import Format, Notes, Record


def read_tensorboard(_file: BinaryIO, notes: Notes, path: Path) -> Iterator[Record]:
    """Yield the scalars of an event file by step.

    Raises:
        UsageError: If TensorBoard is not installed.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as e:
        raise UsageError(f"{path}: reading event files needs the package tensorboard: pip install tensorboard") from e
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    steps: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            steps.setdefault(int(event.step), {})[tag] = float(event.value)
    for tag in events.Tags()["tensors"]:
        for event in events.Tensors(tag):
            array = make_ndarray(event.tensor_proto)
            if array.size == 1 and array.dtype.kind in "fiu":
                steps.setdefault(int(event.step), {})[tag] = float(array.reshape(-1)[0])
            else:
                notes.skip("tensors that are no scalars")
    for at, step in enumerate(sorted(steps), start=1):
        yield Record(at, steps[step], step)


def _sniff(head: bytes, path: Path) -> int:
    return 1_000_000 if "tfevents" in path.name or b"brain.Event:" in head[:64] else 0


FORMAT = Format("tensorboard", "TensorBoard event files", "any", _sniff, read_tensorboard, anywhere=False)
