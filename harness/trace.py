"""Traces: what a run measured, step by step, without loss.

A metric that is absent at a step is *missing*. NaN, +inf, -inf, -0.0 and missing are five different things,
in memory, in JSON lines (which a running job spools; standard library only) and in Parquet (for the store).
All NaNs are one value: sign and payload are dropped when a trace is built.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO, overload

from harness.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

STEP = "step"
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_LOG = logging.getLogger(__name__)


def _name_of(value: float) -> str | None:
    if math.isfinite(value):
        return None
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def to_json_value(value: float | None) -> float | str | None:
    """Return a number as JSON can hold it: non-finite as "nan", "inf", "-inf"; missing as None."""
    return None if value is None else _name_of(value) or float(value)


def from_json_value(value: Any) -> float | None:
    """Undo ``to_json_value``.

    Raises:
        ValueError: If the value is not a number, one of the three strings, or None.
    """
    if value is None:
        return None
    if isinstance(value, str) and value in _NONFINITE:
        return _NONFINITE[value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f'expected a number, "nan", "inf" or "-inf", got {value!r}')


@dataclass(frozen=True, eq=False)
class StepRecord:
    """What was measured at one step.

    Attributes:
        step: Number of the step, from 0.
        metrics: Value (float) by metric name, read-only; a metric that was not measured is absent.

    Raises:
        ValueError: For a negative step, or a metric that is called "step" or nothing.
        TypeError: For a step that is not an integer, or a value that is not a number.
    """

    step: int
    metrics: Mapping[str, float]

    def __post_init__(self) -> None:
        if isinstance(self.step, bool) or not hasattr(self.step, "__index__"):
            raise TypeError(f"step must be an integer, got {self.step!r}")
        step = int(self.step)
        if not 0 <= step < 2**63:
            raise ValueError(f"step must lie in 0..2^63-1, got {step}")
        metrics: dict[str, float] = {}
        for name, value in self.metrics.items():
            if not isinstance(name, str) or name in ("", STEP):
                raise ValueError(f"{name!r} cannot be the name of a metric (step {step})")
            if value is None or isinstance(value, str):
                raise TypeError(f"metric {name} must be a number at step {step}, got {value!r}")
            metrics[name] = float(value)
        object.__setattr__(self, "step", step)
        object.__setattr__(self, "metrics", MappingProxyType(metrics))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepRecord):
            return NotImplemented
        return Trace((self,)) == Trace((other,))

    def __hash__(self) -> int:
        return hash((self.step, frozenset(self.metrics)))

    def __reduce__(self) -> tuple[type[StepRecord], tuple[int, dict[str, float]]]:
        return StepRecord, (self.step, dict(self.metrics))


class Trace(Sequence[StepRecord]):
    """An immutable sequence of step records, kept as columns. Equality is bit for bit; NaN equals NaN.

    Attributes:
        steps: Step numbers, strictly increasing.
        metrics: Names of all metrics present at one step or more, sorted.

    Args:
        records: The records; it is a ValueError if their steps do not increase.
    """

    __slots__ = ("_present", "_values", "metrics", "steps")
    _values: dict[str, array[float]]
    _present: dict[str, bytes]

    def __init__(self, records: Iterable[StepRecord] = ()) -> None:
        records = tuple(records)
        names = {name for record in records for name in record.metrics}
        columns = {name: [record.metrics.get(name) for record in records] for name in names}
        self._fill((record.step for record in records), columns)

    @classmethod
    def from_columns(cls, steps: Iterable[int], columns: Mapping[str, Iterable[float | None]]) -> Trace:
        """Build a trace from increasing steps and, per metric, one value for each step; None is missing.

        Raises:
            ValueError: If the steps do not increase, or a column is longer or shorter than the steps.
        """
        trace = cls.__new__(cls)
        trace._fill(steps, columns)
        return trace

    def _fill(self, steps: Iterable[int], columns: Mapping[str, Iterable[float | None]]) -> None:
        self.steps: tuple[int, ...] = tuple(int(step) for step in steps)
        for before, after in zip((-1, *self.steps), self.steps, strict=False):
            if after <= before:
                raise ValueError(f"steps must increase from 0 on, but step {after} follows step {before}")
        self._values, self._present = {}, {}
        for name in sorted(columns):
            if name in ("", STEP):
                raise ValueError(f"{name!r} cannot be the name of a metric")
            column = list(columns[name])
            if len(column) != len(self.steps):
                raise ValueError(f"metric {name} has {len(column)} values for {len(self.steps)} steps")
            present = bytes(value is not None for value in column)
            if any(present):
                self._present[name] = present
                self._values[name] = array("d", [math.nan if v is None or v != v else v for v in column])
        self.metrics: tuple[str, ...] = tuple(self._values)

    def __len__(self) -> int:
        return len(self.steps)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Trace: ...
    def __getitem__(self, index: int | slice) -> StepRecord | Trace:
        if isinstance(index, slice):
            return Trace.from_columns(self.steps[index], {m: self.column(m)[index] for m in self.metrics})
        step = self.steps[index]  # raises IndexError
        return StepRecord(step, {m: self._values[m][index] for m in self.metrics if self._present[m][index]})

    def __iter__(self) -> Iterator[StepRecord]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        if self.steps != other.steps or self._present != other._present:
            return False
        return all(self._values[m].tobytes() == other._values[m].tobytes() for m in self.metrics)

    def __hash__(self) -> int:
        return hash((self.steps, self.metrics))

    def __repr__(self) -> str:
        span = f", {self.steps[0]}..{self.steps[-1]}" if self.steps else ""
        return f"Trace({len(self)} steps{span}; {', '.join(self.metrics) or 'no metrics'})"

    def column(self, name: str) -> list[float | None]:
        """Return one metric, None where it is missing; all None for a metric that the trace does not have."""
        held = zip(self._values.get(name, ()), self._present.get(name, b""), strict=True)
        return [v if p else None for v, p in held] if name in self._values else [None] * len(self)

    def array(self, name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """Return values (float64, NaN where missing) and presence (bool), each ``[steps]`` and read-only."""
        import numpy as np

        if name not in self._values:
            values, present = np.full(len(self), np.nan), np.zeros(len(self), dtype=bool)
        else:
            values = np.frombuffer(self._values[name], dtype=np.float64)
            present = np.frombuffer(self._present[name], dtype=np.bool_)
        values.flags.writeable = present.flags.writeable = False
        return values, present

    def window(self, start: int, stop: int) -> Trace:
        """Return the part with ``start <= step < stop``."""
        inside = [i for i, step in enumerate(self.steps) if start <= step < stop]
        return self[inside[0] : inside[-1] + 1] if inside else Trace()

    def digest(self) -> str:
        """Return the SHA-256 of the contents, in hexadecimal.

        Hashed are the number of steps, the steps (big-endian int64) and, per metric in order of name: length
        of the name, the name, one byte per step for presence, big-endian IEEE-754 doubles (NaN for missing).
        """
        sha = hashlib.sha256(len(self).to_bytes(8, "big"))
        sha.update(_big_endian(array("q", self.steps)))
        for name in self.metrics:
            text = name.encode()
            sha.update(len(text).to_bytes(8, "big") + text + self._present[name])
            sha.update(_big_endian(self._values[name]))
        return sha.hexdigest()


def _big_endian(numbers: array[Any]) -> bytes:
    numbers = numbers[:]
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers.tobytes()


def first_difference(a: Trace, b: Trace) -> tuple[int, str] | None:
    """Return the first step, and there the first metric by name, at which two traces differ bit for bit.

    ``(step, "step")`` means that only one of them has that step; None that they are equal.
    """
    if a == b:
        return None
    at_a, at_b = ({step: i for i, step in enumerate(trace.steps)} for trace in (a, b))
    columns = {name: (a.column(name), b.column(name)) for name in sorted({*a.metrics, *b.metrics})}
    for step in sorted({*a.steps, *b.steps}):
        if step not in at_a or step not in at_b:
            return step, STEP
        for name, (left, right) in columns.items():
            if not _same(left[at_a[step]], right[at_b[step]]):
                return step, name
    raise AssertionError("unequal traces without a difference")


def _same(x: float | None, y: float | None) -> bool:
    if x is None or y is None or x != x or y != y:
        return (x is None) == (y is None) and (x is None or (x != x) == (y != y))
    return x == y and math.copysign(1.0, x) == math.copysign(1.0, y)


def encode_line(record: StepRecord) -> str:
    """Return a record as one line of JSON, without the newline: ``{"step": 3, "loss": 0.1, "kl": "nan"}``."""
    line: dict[str, Any] = {STEP: record.step}
    line.update((name, to_json_value(record.metrics[name])) for name in sorted(record.metrics))
    return json.dumps(line, allow_nan=False)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    held = dict(pairs)
    if len(held) != len(pairs):
        raise ValueError("a name occurs twice")
    return held


def _not_json(constant: str) -> Any:
    raise ValueError(f'{constant} is not JSON; write it as the string "nan", "inf" or "-inf"')


def decode_line(line: str) -> StepRecord:
    """Undo ``encode_line``.

    Raises:
        ValueError: If the line is not a JSON object of a step and numbers, each named once.
    """
    data = json.loads(line, object_pairs_hook=_unique, parse_constant=_not_json)
    if not isinstance(data, dict) or type(data.get(STEP)) is not int:
        raise ValueError("expected an object with an integer 'step'")
    step, metrics = data.pop(STEP), {}
    for name, value in data.items():
        try:
            number = from_json_value(value)
        except (ValueError, OverflowError) as e:
            raise ValueError(f"metric {name}: {e}") from None
        if number is None:
            raise ValueError(f"metric {name} is null; a missing metric is left out")
        metrics[name] = number
    return StepRecord(step, metrics)


class TraceWriter:
    """Spools records to a new file of JSON lines, flushing each step: a killed run leaves whole lines."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._file: TextIO | None = None
        self._last = -1

    def __enter__(self) -> TraceWriter:
        self._file = self._path.open("w", encoding="utf-8", newline="\n")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, record: StepRecord) -> None:
        """Append one record.

        Raises:
            ValueError: If the writer is not open, or the step does not follow the last one.
        """
        if self._file is None:
            raise ValueError(f"the trace writer of {self._path} is not open; use it in a with statement")
        if record.step <= self._last:
            raise ValueError(f"step {record.step} was written to {self._path} after step {self._last}")
        self._file.write(encode_line(record) + "\n")
        self._file.flush()
        self._last = record.step


def read_jsonl(path: str | os.PathLike[str]) -> Trace:
    """Read a file of JSON lines. A last line that a kill cut short is dropped, with a warning in the log.

    Raises:
        UsageError: If the file cannot be read or a line is not a record; names file and line.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as e:
        raise UsageError(f"trace {path} cannot be read: {e.strerror}") from None
    records: list[StepRecord] = []
    last = len(lines)
    for number, line in enumerate(lines, start=1):
        if number == last and not line:
            break  # the newline that ends the file
        try:
            record = decode_line(line.decode())
        except (ValueError, TypeError) as e:
            if number == last:
                _LOG.warning("%s:%d: dropped a last line that was cut short (%d bytes)", path, number, len(line))
                break
            raise UsageError(f"{path}:{number}: not a step record: {e}") from None
        if records and record.step <= records[-1].step:
            raise UsageError(f"{path}:{number}: step {record.step} follows step {records[-1].step}")
        records.append(record)
    return Trace(records)


def write_parquet(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace to a Parquet file: int64 ``step``, a float64 column per metric, null for missing.

    The file appears whole or not at all.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {STEP: pa.array(trace.steps, type=pa.int64())}
    for name in trace.metrics:
        columns[name] = pa.array(trace.column(name), type=pa.float64(), from_pandas=False)
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(pa.table(columns), temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def read_parquet(path: str | os.PathLike[str]) -> Trace:
    """Read a Parquet file that ``write_parquet`` wrote.

    Raises:
        UsageError: If the file cannot be read, or its columns are not those of a trace.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path).read()
    except (OSError, pa.ArrowException) as e:
        raise UsageError(f"trace {path} cannot be read as Parquet: {e}") from None
    names = table.column_names
    if names.count(STEP) != 1 or len(set(names)) != len(names):
        raise UsageError(f"trace {path} must have one column 'step' and no name twice, got {names}")
    for name, kind in zip(names, table.schema.types, strict=True):
        expected = pa.int64() if name == STEP else pa.float64()
        if kind != expected:
            raise UsageError(f"trace {path}: column {name} must be {expected}, got {kind}")
    if table[STEP].null_count:
        raise UsageError(f"trace {path}: column step has {table[STEP].null_count} nulls")
    columns = {name: table[name].to_pylist() for name in names if name != STEP}
    try:
        return Trace.from_columns(table[STEP].to_pylist(), columns)
    except ValueError as e:
        raise UsageError(f"trace {path}: {e}") from None
