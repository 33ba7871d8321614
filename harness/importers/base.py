"""What a log format is, and what it hands over: records of numbers, before anything is decided about steps and runs."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import BinaryIO

from harness.errors import UsageError, unknown


@dataclass
class Record:
    """What one record of a log says.

    Attributes:
        line: Number of its first line, from 1; of a table its row.
        values: Number by native name. A name that the record does not have is missing, not zero.
        step: Its step, None if the record does not say.
        run: Label of its run, empty if the log holds one.
    """

    line: int
    values: dict[str, float]
    step: int | None = None
    run: str = ""


@dataclass
class Notes:
    """What was left out of a log and why, and what its reader must know.

    Attributes:
        skipped: Count by reason.
        warnings: Sentences, each once.
    """

    skipped: Counter[str] = field(default_factory=Counter)
    warnings: dict[str, None] = field(default_factory=dict)

    def skip(self, reason: str, count: int = 1) -> None:
        """Count something that was left out."""
        if count:
            self.skipped[reason] += count

    def warn(self, sentence: str) -> None:
        """Say something once."""
        self.warnings[sentence] = None


@dataclass(frozen=True)
class Format:
    """A log format.

    Attributes:
        name: Its name on the command line.
        summary: One line.
        names: Which map of metric names it uses (``names/NAME.yaml``).
        sniff: Says from the first bytes and the file's name how many records it sees; 0 for none.
        read: Yields the records of an open file.
        warnings: What every reader of such a log must know.
        repeats: Whether a step may be printed more than once: ``ranks`` if every rank prints it.
        places: Decimal places that every value is printed with; None if as many as it has.
        hides: Whether the framework replaces a non-finite loss before it logs.
        prose: Whether it is found in prose, so that records of a program go before it.
        anywhere: Whether its first record may stand deep in a file; False if it is known by how the file begins.
    """

    name: str
    summary: str
    names: str
    sniff: Callable[[bytes, Path], int]
    read: Callable[[BinaryIO, Notes, Path], Iterator[Record]]
    warnings: tuple[str, ...] = ()
    repeats: bool = False
    places: int | None = None
    hides: bool = False
    prose: bool = False
    anywhere: bool = True


@cache
def formats() -> Mapping[str, Format]:
    """Find all formats: every module of this package that defines ``FORMAT`` (or several in ``FORMATS``)."""
    import harness.importers as package

    found: dict[str, Format] = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for one in getattr(module, "FORMATS", (module.FORMAT,) if hasattr(module, "FORMAT") else ()):
            found[one.name] = one
    return dict(sorted(found.items()))


def find(name: str) -> Format:
    """Return a format by name.

    Raises:
        UsageError: If there is none of that name.
    """
    known = formats()
    if name not in known:
        raise unknown("log format", name, known)
    return known[name]


def detect(path: Path, blocks: Iterable[bytes]) -> Format:
    """Find the format whose records a file holds.

    Args:
        path: Its path.
        blocks: Its bytes, in blocks; reading ends with the first that holds records of a program. Formats that are
            known by how a file begins, or that are found in prose, look at the first block only.

    Raises:
        UsageError: If no format sees a record, or two see as many.
    """
    known = formats()
    seen: dict[str, int] = {}
    size = 0
    for block in blocks:
        here = {
            n: count for n, one in known.items() if (not size or one.anywhere) and (count := one.sniff(block, path))
        }
        seen |= here
        size += len(block)
        programs = {name: count for name, count in seen.items() if not known[name].prose}
        if programs:
            seen = programs
            break
    if not seen:
        raise UsageError(
            f"{path}: no known record in the first {size} bytes; say --format (one of {', '.join(formats())}) "
            "if you know what wrote it"
        )
    best = max(seen.values())
    names = [name for name, count in seen.items() if count == best]
    if len(names) > 1:
        raise UsageError(f"{path}: could be {' or '.join(names)} ({best} records each); say --format")
    return find(names[0])


def matches(pattern: re.Pattern[bytes]) -> Callable[[bytes, Path], int]:
    """Return a sniffer that counts matches."""
    return lambda head, _path: len(pattern.findall(head))
