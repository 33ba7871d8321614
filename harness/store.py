"""The content-addressed store of runs: written once, whole or not at all, and verified by digest on every read."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import HarnessError, MachineError
from harness.spec import RunSpec
from harness.trace import Trace, read_parquet, write_parquet

SCHEMA = "harness/store@1"
LIBRARIES = ("torch", "transformers", "numpy", "deepspeed")
_LOG = logging.getLogger(__name__)


def harness_home() -> Path:
    """Return where runs, originals and the tracking database live: HARNESS_HOME, or ``~/.cache/harness``."""
    home = Path(os.environ.get("HARNESS_HOME") or Path.home() / ".cache" / "harness").expanduser().absolute()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise MachineError(f"HARNESS_HOME {home} cannot be created ({e.strerror}); set it to a writable folder") from e
    return home


@functools.cache
def _machine() -> str:
    """Describe the kind of CPU: kinds round differently, so that their traces are not interchangeable."""
    lines = {platform.machine()}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                lines.update(f for f in value.split() if f.startswith(("avx", "fma", "sve", "asimd", "amx")))
    return " ".join(sorted(lines))


@functools.cache
def _versions() -> tuple[str, ...]:
    found = {d.name: d.version for d in map(_distribution, LIBRARIES) if d is not None}
    python = f"python {sys.version_info[0]}.{sys.version_info[1]}"
    return (python, *(f"{name} {found.get(name, 'missing')}" for name in LIBRARIES))


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _engine_sources() -> str:
    root = Path(__file__).parent
    beside = {
        "originals.py",
        "ability.py",
        "device.py",
        "preload.py",
    }  # make models, or look at them: no trace hangs on them
    files = [
        *(p for p in (root / "rl").rglob("*.py") if p.name not in beside),
        *(root / f"{n}.py" for n in ("spec", "seams", "inject", "trace", "arm")),
    ]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def code_digest(extra: Iterable[Path] = ()) -> str:
    """Return a digest of everything but the specification that decides a trace.

    It covers the sources of the run and the injector, the ``extra`` files, the versions of the numerical libraries
    (read without importing them), and the kind of CPU.

    Args:
        extra: More source files: the fault's own.
    """
    parts = [_engine_sources(), *_versions(), _machine(), *(p.read_text(encoding="utf-8") for p in extra)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass(frozen=True)
class StoredRun:
    """A finished run.

    Attributes:
        key: Its content address.
        folder: Where its files lie.
        digest: Digest of its trace.
        fired: Number of steps in which its fault ran.
        sidecar: What is not part of the result: seconds, memory, parameters, effective settings.
    """

    key: str
    folder: Path
    digest: str
    fired: int
    sidecar: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def trace_path(self) -> Path:
        """The trace as Parquet."""
        return self.folder / "trace.parquet"

    @property
    def tape_path(self) -> Path | None:
        """The tape, if one was kept."""
        path = self.folder / "tape.safetensors"
        return path if path.exists() else None

    def trace(self) -> Trace:
        """Read the trace."""
        return read_parquet(self.trace_path)


class Store:
    """A folder of finished runs, safe with many writers.

    Attributes:
        root: The folder.
    """

    def __init__(self, root: Path) -> None:
        """Open a store, made if it is not there.

        Raises:
            MachineError: If the folder cannot be written or was made by another version of the store.
        """
        self.root = root
        try:
            (root / "runs").mkdir(parents=True, exist_ok=True)
            marker = root / "SCHEMA"
            if not marker.exists():
                _write_atomically(marker, SCHEMA)
        except OSError as e:
            raise MachineError(f"store {root} cannot be written ({e.strerror})") from e
        found = marker.read_text(encoding="utf-8").strip()
        if found != SCHEMA:
            raise MachineError(
                f"store {root} has schema {found}, this version reads {SCHEMA}; use another HARNESS_HOME"
            )

    def _folder(self, key: str) -> Path:
        return self.root / "runs" / key[:2] / key

    def get(self, key: str) -> StoredRun | None:
        """Return a finished run, or None. A damaged one is removed, so that it is run again rather than trusted."""
        folder = self._folder(key)
        if not folder.is_dir():
            return None
        try:
            result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
            run = StoredRun(key, folder, result["digest"], result["fired"], result["sidecar"])
            if run.trace().digest() != run.digest:
                raise ValueError("the trace does not match its digest")
            if result["tape"] != _sha256(run.tape_path):
                raise ValueError("the tape does not match its digest")
        except (OSError, ValueError, KeyError, TypeError, HarnessError) as e:
            _LOG.warning("stored run %s is damaged (%s); it will be run again", key, e)
            shutil.rmtree(folder, ignore_errors=True)
            return None
        return run

    def begin(self, key: str) -> Path:
        """Return a fresh temporary folder for a run; what dead processes left behind for it is removed."""
        parent = self._folder(key).parent
        parent.mkdir(parents=True, exist_ok=True)
        for stale in parent.glob(f".{key}.*"):
            if not _alive(stale.name.rsplit(".", 1)[-1]):
                shutil.rmtree(stale, ignore_errors=True)
        folder = parent / f".{key}.{os.getpid()}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def commit(
        self, key: str, folder: Path, spec: RunSpec, trace: Trace, fired: int, sidecar: dict[str, Any]
    ) -> StoredRun:
        """Write a finished run's result into its temporary folder and rename that into place.

        Raises:
            HarnessError: If another process has finished the same run with another trace.
        """
        write_parquet(trace, folder / "trace.parquet")
        tape = folder / "tape.safetensors"
        digest = trace.digest()
        result = {
            "digest": digest,
            "fired": fired,
            "tape": _sha256(tape if tape.exists() else None),
            "sidecar": sidecar,
        }
        (folder / "spec.json").write_text(spec.model_dump_json(indent=2), encoding="utf-8")
        (folder / "result.json").write_text(json.dumps(result, allow_nan=False), encoding="utf-8")
        target = self._folder(key)
        try:
            folder.rename(target)
        except OSError:
            other = self.get(key)
            if other is None:
                raise
            shutil.rmtree(folder, ignore_errors=True)
            if other.digest != digest:
                raise HarnessError(
                    f"run {key} was finished twice with different traces ({other.digest[:12]} and "
                    f"{digest[:12]}): it is not deterministic on this machine"
                ) from None
            return other
        return StoredRun(key, target, digest, fired, sidecar)

    def runs(self) -> Iterator[StoredRun]:
        """Yield every intact run, in order of key."""
        for folder in sorted((self.root / "runs").glob("*/*")):
            if not folder.name.startswith(".") and (run := self.get(folder.name)) is not None:
                yield run


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def _sha256(path: Path | None) -> str | None:
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
