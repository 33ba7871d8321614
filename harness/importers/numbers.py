"""Numbers as people and programs print them."""

from __future__ import annotations

import math
import re

PLAIN = r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
"""A number without separators."""

NUMBER = rf"(?:np\.\w+\()?(?:[-+]?\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?|{PLAIN}|[-+]?(?:nan|NaN|inf|Inf|[Ii]nfinity))\)?"
"""Anything that ``number`` takes."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RAY = re.compile(r"^\s*\([^()\n]*pid=\d+[^()\n]*\)\s*", re.MULTILINE)
_WHOLE = re.compile(NUMBER)
_CELL_NOISE = str.maketrans("", "", "*`")
_DASHES = {"", "-", "\u2014", "\u2013", "n/a", "N/A", "none", "None", "null"}


def number(text: str) -> float | None:
    """Return the number that a text is, with its sign of zero; None if it is not one."""
    text = text.strip()
    if not _WHOLE.fullmatch(text):
        return None
    bare = re.sub(r"^np\.\w+\(|\)$", "", text).replace(",", "").replace("_", "")
    try:
        return float(bare)
    except (ValueError, OverflowError):
        return None


def cell(text: str) -> float | str | None:
    """Return what a cell of a table holds: a number, None for an empty one or a dash, otherwise the text.

    Marks of emphasis are dropped, a percentage becomes a share.
    """
    bare = text.translate(_CELL_NOISE).strip()
    if bare in _DASHES:
        return None
    percent = bare.removesuffix("%").strip()
    if percent != bare and (share := number(percent)) is not None:
        exact = number(f"{percent}e-2")  # 27.44 % is 0.2744, which 27.44 / 100 is not
        return share / 100 if exact is None else exact
    value = number(bare)
    return bare if value is None else value


def clean(raw: bytes) -> str:
    """Decode a piece of a log without colours and without the prefixes of Ray's workers."""
    return _RAY.sub("", _ANSI.sub("", raw.decode("utf-8", "replace")))


def whole(value: float | None) -> int | None:
    """Return a step number; None if it is not a whole number of at least 0."""
    if value is None or not math.isfinite(value) or value < 0 or value != int(value) or value >= 2**63:
        return None
    return int(value)
