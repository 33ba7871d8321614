"""The errors a user may meet: one sentence each, with the exit code that the command line gives for them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HarnessError(Exception):
    """An error that is shown as one sentence, without a traceback.

    Attributes:
        exit_code: Status of the process when the error reaches the command line.
    """

    exit_code = 3


class UsageError(HarnessError, ValueError):
    """What was asked for does not exist or does not fit: exit code 2."""

    exit_code = 2


class MachineError(HarnessError):
    """The machine, an installed library or a service is not as needed: exit code 3."""

    exit_code = 3


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Build the error for a name that does not exist, with the nearest names that do.

    Args:
        kind: What the name should have been, for example ``"fault"``.
        name: The name as given.
        known: All names that exist.

    Returns:
        The error, to be raised by the caller.
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}?" if near else f"known: {', '.join(known) or 'none'}"
    return UsageError(f"unknown {kind} {name!r}; {hint}")
