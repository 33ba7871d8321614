"""Runs of one arm from whatever holds them: a trace, a log, an MLflow run, or a folder with a file per seed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.errors import UsageError
from harness.importers.reading import import_logs
from harness.trace import Trace, read_parquet

SEED = re.compile(r"seed[-_= ]?(\d+)", re.IGNORECASE)


def load_runs(
    word: str, form: str = "auto", chosen: Mapping[str, str] | None = None
) -> tuple[dict[int, Trace], list[str]]:
    """Read the runs of one arm.

    Args:
        word: A file (trace or log), ``mlflow:RUN``, or a folder of such files.
        form: Format of logs, or ``auto``.
        chosen: Native name by canonical name, where the map of names is to be overruled.

    Returns:
        Traces by seed, and the warnings of the importers. Seeds are what the names of files say behind "seed";
        if they do not all say one, and for several runs in one log, they are counted from 0.

    Raises:
        UsageError: If there is nothing to read, or two files say the same seed.
    """
    path = Path(word)
    if word.startswith("mlflow:") or not path.is_dir():
        runs, warnings = _read(word, form, chosen)
        return dict(enumerate(runs)), warnings
    files = sorted(f for f in path.iterdir() if f.is_file() and not f.name.startswith("."))
    if not files:
        raise UsageError(f"{path} holds no file: a folder of seeds has one trace or log per seed")
    said = [SEED.search(f.stem) for f in files]
    seeds = [int(m[1]) for m in said if m]
    if len(seeds) < len(files):
        seeds = list(range(len(files)))
    found: dict[int, Trace] = {}
    warnings = []
    for seed, file in zip(seeds, files, strict=True):
        runs, more = _read(str(file), form, chosen)
        if len(runs) > 1:
            raise UsageError(f"{file} holds {len(runs)} runs; a folder of seeds has one run per file")
        if seed in found:
            raise UsageError(f"{file}: seed {seed} is there twice in {path}")
        found[seed] = runs[0]
        warnings += more
    return found, list(dict.fromkeys(warnings))


def load_named(
    words: Sequence[str], form: str = "auto", chosen: Mapping[str, str] | None = None
) -> tuple[dict[str, Trace], list[str]]:
    """Read every run that some traces or logs hold, by label, with the warnings of the importers.

    Raises:
        UsageError: If something cannot be read.
    """
    traces = {w: read_parquet(w) for w in words if w.endswith(".parquet")}
    logs = [w for w in words if w not in traces]
    if not logs:
        return traces, []
    found = import_logs(logs, form, chosen)
    return {**traces, **found.runs}, list(found.notes.warnings)


def _read(word: str, form: str, chosen: Mapping[str, str] | None) -> tuple[list[Trace], list[str]]:
    runs, warnings = load_named([word], form, chosen)
    return list(runs.values()), warnings
