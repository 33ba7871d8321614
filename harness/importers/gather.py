"""From records to runs: steps, repeats, restarts, names; ambiguity is an error, what is left out is counted."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

from harness.errors import UsageError
from harness.importers.base import Format, Notes, Record
from harness.importers.names import NameMap
from harness.trace import Trace

LAG = 16
"""Steps that a rank may lag behind the one that prints first."""


class Column(Sequence["float | None"]):
    """Values of one metric, None where missing, in 9 bytes each: long logs have millions."""

    def __init__(self, missing: int = 0) -> None:
        self._values = array("d", bytes(8 * missing))
        self._present = bytearray(missing)

    def append(self, value: float | None) -> None:
        """Add the value of another step."""
        self._values.append(0.0 if value is None else value)
        self._present.append(value is not None)

    def fill(self, value: float) -> None:
        """Give the last step its value."""
        self._values[-1], self._present[-1] = value, 1

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> float | None: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[float | None]: ...
    def __getitem__(self, index: int | slice) -> float | Sequence[float | None] | None:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._values[index] if self._present[index] else None

    def __iter__(self) -> Iterator[float | None]:
        return (v if p else None for v, p in zip(self._values, self._present, strict=True))


@dataclass
class Run:
    """One run as it grows.

    Attributes:
        label: What it is called.
        steps: Its steps.
        columns: Values by native name, None where missing.
        lines: Line of each step's first record.
        counted: How many of the steps were counted, since their records did not say.
    """

    label: str
    steps: array[int] = field(default_factory=lambda: array("q"))
    columns: dict[str, Column] = field(default_factory=dict)
    lines: array[int] = field(default_factory=lambda: array("q"))
    counted: int = 0

    def add(self, step: int, record: Record) -> None:
        """Append a step."""
        before = len(self.steps)
        self.steps.append(step)
        self.lines.append(record.line)
        for name, value in record.values.items():
            if name not in self.columns:
                self.columns[name] = Column(before)
            self.columns[name].append(value)
        for column in self.columns.values():
            if len(column) == before:
                column.append(None)

    def merge(self, record: Record) -> None:
        """Add what a further record of the last step says about metrics that it lacked."""
        for name, value in record.values.items():
            column = self.columns.setdefault(name, Column(len(self.steps)))
            if column[-1] is None:
                column.fill(value)


def gather(records: Iterable[Record], form: Format, names: NameMap, notes: Notes, where: str) -> list[Run]:
    """Put records into runs.

    A record of the last step that repeats its values is skipped; one that holds other metrics is merged; one that says
    something else of a known metric is an error, unless every rank prints its own throughput. A step that goes back
    begins another run. Records without a step are counted from 1, or on from the last step, and that is said.

    Raises:
        UsageError: If a step is there twice with different values; names file and lines.
    """
    runs: dict[str, list[Run]] = {}
    for record in records:
        known = runs.setdefault(record.run, [])
        if not known:
            known.append(Run(record.run))
        run = known[-1]
        step = record.step
        if step is None:
            step = run.steps[-1] + 1 if run.steps else 1
            run.counted += 1
        if run.steps and step == run.steps[-1]:
            _again(run, record, form, names, notes, where)
        elif run.steps and step < run.steps[-1] and form.repeats and _late(run, step, record, names):
            notes.skip("repeated records of a step")
        elif run.steps and step < run.steps[-1]:
            notes.warn(f"{where}:{record.line}: step {step} follows step {run.steps[-1]}: taken for another run")
            known.append(Run(f"{record.run or 'run'} {len(known) + 1}"))
            known[-1].add(step, record)
        else:
            run.add(step, record)
    found = [run for known in runs.values() for run in known if run.steps]
    for run in found:
        if run.counted == len(run.steps):
            notes.warn(f"{where}: no step in the log: records were counted from 1")
        elif run.counted:
            notes.warn(
                f"{where}: {run.counted} of {len(run.steps)} records had no step and were counted on from the last one"
            )
    return found


def _again(run: Run, record: Record, form: Format, names: NameMap, notes: Notes, where: str) -> None:
    differing = {
        name: (run.columns[name][-1], value)
        for name, value in record.values.items()
        if name in run.columns and run.columns[name][-1] is not None and not _same(run.columns[name][-1], value)
    }
    if form.repeats:
        differing = {name: pair for name, pair in differing.items() if name in names.natives}
    if differing:
        name, (first, second) = next(iter(differing.items()))
        raise UsageError(
            f"{where}:{record.line}: step {record.step} was already at line {run.lines[-1]} with {name} {first:g}, now "
            f"{second:g}; two runs or ranks are mixed here: split the file, or keep one rank's lines"
        )
    fresh = [n for n in record.values if n not in run.columns or run.columns[n][-1] is None]
    if fresh:
        run.merge(record)
        notes.skip("further records of a step, merged")
    else:
        notes.skip("repeated records of a step")


def _late(run: Run, step: int, record: Record, names: NameMap) -> bool:
    """Say whether a rank that lags behind repeats one of the last steps."""
    if step not in run.steps[-LAG:]:
        return False
    at = len(run.steps) - LAG + run.steps[-LAG:].index(step) if len(run.steps) > LAG else run.steps.index(step)
    known = {n: v for n, v in record.values.items() if n in names.natives and n in run.columns}
    return bool(known) and all(_same(run.columns[n][at], v) for n, v in known.items())


def _same(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return a == b or (math.isnan(a) and math.isnan(b))


def trace_of(run: Run, names: NameMap) -> Trace:
    """Return a run as a trace: native metrics, and canonical ones filled from them step by step."""
    return with_canonical(run.steps, run.columns, names)


def with_canonical(steps: Iterable[int], natives: Mapping[str, Sequence[float | None]], names: NameMap) -> Trace:
    """Return columns by native name as a trace that has the canonical ones as well."""
    columns = {name: column for name, column in natives.items() if name != "step"}
    for canonical, known in names.metrics.items():
        held = [columns[n] for n in known if n in columns]
        if held:
            columns[canonical] = held[0]
    return Trace.from_columns(steps, {n.replace("\n", ""): c for n, c in columns.items() if n})
