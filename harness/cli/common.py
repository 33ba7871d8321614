"""What several commands share: JSON output, ``--set``, a clean standard output, and what Ctrl-C means."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.errors import UsageError, unknown

INTERRUPTED = "harness: interrupted; what was finished is kept, and the same command goes on from there"
Json = Annotated[
    str | None,
    typer.Option("--json", metavar="[=FILE]", help="Write JSON to FILE, or to standard output in place of the table."),
]


def plain(data: Any) -> Any:
    """Return data as strict JSON can hold it: non-finite numbers become the strings "nan", "inf" and "-inf"."""
    if isinstance(data, float) and not math.isfinite(data):
        return "nan" if math.isnan(data) else "inf" if data > 0 else "-inf"
    if isinstance(data, Mapping):
        return {str(k): plain(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [plain(v) for v in data]
    return data


def write_json(data: Mapping[str, Any], target: str) -> None:
    """Write JSON to a file, whole or not at all, or to standard output for ``-``.

    Raises:
        UsageError: If the file cannot be written.
    """
    text = json.dumps(plain(data), indent=2, allow_nan=False, ensure_ascii=target == "-")
    if target == "-":
        typer.echo(text)
    else:
        write_text(Path(target), text + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all.

    Raises:
        UsageError: If it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as e:
        raise UsageError(f"{path} cannot be written ({e.strerror})") from e


def check_file(target: str | None) -> None:
    """Refuse a ``--json`` target that cannot be a file, before anything is computed.

    Raises:
        UsageError: If it is empty, a folder, or lies where nothing can be written.
    """
    if target == "":
        raise UsageError("--json= needs the name of a file; --json alone prints to standard output")
    if target is not None and target != "-":
        if Path(target).is_dir():
            raise UsageError(f"--json={target} is a folder; give the name of a file")
        check_folder(Path(target).absolute().parent)


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made or written, without making it.

    Raises:
        UsageError: If its nearest existing ancestor is not a folder that may be written.
    """
    there = folder
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise UsageError(f"{folder} cannot be made: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{folder} cannot be written: no permission in {there}")


def parse_settings(words: list[str], groups: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Parse ``group.key=value`` words, for example ``rl.lr=1e-4`` or ``rl.trainer.dtype=bfloat16``.

    Args:
        words: The words; of two for one key the last counts.
        groups: Groups that exist.

    Returns:
        Values by group and key, nested where a key has dots; values are YAML scalars.

    Raises:
        UsageError: If a word is not of that form, its group does not exist, or its value is not a finite scalar.
    """
    found: dict[str, dict[str, Any]] = {group: {} for group in groups}
    for word in words:
        path, equals, value = word.partition("=")
        group, *keys = path.split(".")
        if not equals or not keys or not all(keys):
            raise UsageError(f"--set {word!r} is not of the form group.key=value, for example fault.severity=2")
        if group not in groups:
            raise unknown("group in --set:", group, groups)
        inner = found[group]
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise UsageError(f"--set {word!r}: {key} was given a value of its own")
        inner[keys[-1]] = _scalar(word, value)
    return found


def _scalar(word: str, text: str) -> Any:
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UsageError(f"--set {word!r}: the value is not a YAML scalar") from None
    if isinstance(value, str):
        try:  # YAML 1.1 takes 1e-4 for a string; people mean the number
            value = float(value)
        except ValueError:
            return value
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"--set {word!r}: the value must be finite")
    return value


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings with changes on top; a change that is a mapping is merged into one that is there."""
    result = dict(base)
    for key, value in changes.items():
        inner = result.get(key)
        result[key] = merged(inner, value) if isinstance(value, Mapping) and isinstance(inner, Mapping) else value
    return result


@contextmanager
def interruptible() -> Iterator[None]:
    """End with status 130 and one sentence on Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(INTERRUPTED, err=True)
        raise typer.Exit(130) from None


@contextmanager
def clean_stdout() -> Iterator[None]:
    """Send what libraries, faults and worker processes print on standard output to standard error instead."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
