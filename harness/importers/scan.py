"""Records in a long text, found by one expression in constant memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

from harness.importers.base import Notes

BLOCK = 1 << 22
LONGEST = 1 << 16
"""Longest record, in bytes."""


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
    number = 0
    while piece := file.readline(BLOCK):
        number += 1
        yield number, piece
