"""Records in a long text, found by one expression in constant memory."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import BinaryIO

from harness.importers.base import Notes

BLOCK = 1 << 22
LONGEST = 1 << 16
"""Longest record, in bytes."""
WORD = 64
OPEN_END = re.compile(
    rb"(?:[-+.,\w]*\d[-+.,\w]*|[-+]?(?:n|na|nan|i|inf?|infi\w*)|[-+.]+)[ \t]*\Z", re.ASCII | re.IGNORECASE
)
"""A number, or the beginning of one, that nothing ends."""


def scan(file: BinaryIO, pattern: re.Pattern[bytes], notes: Notes) -> Iterator[tuple[int, re.Match[bytes]]]:
    """Yield the matches of an expression with the number of the line that each begins in.

    Args:
        file: The log.
        pattern: Matches one record, of at most ``LONGEST`` bytes.
        notes: Where the lines are counted that belong to no record.
    """
    held, line, last = b"", 1, False
    used, reached, breaks, tail = 0, 0, 0, b"\n"
    while not last:
        block = file.read(BLOCK)
        last = not block
        held += block
        breaks, tail = breaks + block.count(b"\n"), block[-1:] or tail
        limit = len(held) if last else len(held) - LONGEST
        done = counted = 0
        for match in pattern.finditer(held):
            if match.end() > limit and not last:
                break
            line += held.count(b"\n", counted, match.start())
            counted, done = match.start(), match.end()
            ends = line + match.group().rstrip(b"\n").count(b"\n")
            used += ends - max(line - 1, reached)
            reached = ends
            yield line, match
        keep = max(done, held.rfind(b"\n", 0, max(limit, 0)) + 1)
        line += held.count(b"\n", counted, keep)
        held = held[keep:]
        if not last and len(held) > BLOCK + 2 * LONGEST:  # one endless line without a record
            held = held[-LONGEST:]
    notes.skip("lines without a record", max(0, breaks + (tail != b"\n") - used))


def lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield lines with their numbers; a line longer than ``BLOCK`` comes in pieces."""
    number, held = 1, b""
    while block := file.read(BLOCK):
        *whole, held = (held + block).split(b"\n")
        for line in whole:
            yield number, line + b"\n"
            number += 1
        if len(held) > BLOCK:
            yield number, held
            held = b""
    if held:
        yield number, held


class Settled(io.RawIOBase):
    """A log without the last word of a file that ends in the middle of a line: nobody knows how it goes on.

    Args:
        file: The log.
        notes: Where it is said that a word was left out.
    """

    def __init__(self, file: BinaryIO, notes: Notes) -> None:
        self._file, self._notes, self._held, self._last = file, notes, b"", False

    def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes, all that is left if negative; empty at the end."""
        if size < 0:
            return b"".join(iter(lambda: self.read(BLOCK), b""))
        while not self._last and len(self._held) < size + WORD:
            block = self._file.read(max(size, WORD))
            self._held += block
            if not block:
                self._last = True
                self._settle()
        out, self._held = self._held[:size], self._held[size:]
        return out

    def _settle(self) -> None:
        found = OPEN_END.search(self._held[-WORD:])
        if found is None:
            return
        word = found.group().decode("ascii")
        self._held = self._held[: -len(word)]
        self._notes.skip("last words of a file without a line break")
        self._notes.warn(
            f"the file ends without a line break: its last word {word!r} may be cut short and was left out"
        )
