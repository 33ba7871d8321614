"""The hidden folder in which a proxy is built, beside the one it will become: one builder at a time, resumable."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from proxies.checkpoint import Checkpoint, CheckpointError, write_json


class Workplace(AbstractContextManager["Workplace"]):
    """Work of an earlier, interrupted build is kept if it was on the same inputs and the same files.

    Attributes:
        profile: folder of the finished layers.
        proxy: folder that becomes the result.
        log: file that remembers finished shards.
    """

    def __init__(
        self, out: Path, checkpoint: Checkpoint, inputs: dict[str, Any], waiting: Callable[[], None] = lambda: None
    ) -> None:
        """Say what is to be built; nothing is touched before the context is entered.

        Args:
            out: the folder to be made.
            checkpoint: the original.
            inputs: everything that the result depends on.
            waiting: called if another process is at work on the same folder, before waiting for it.
        """
        self._out, self._waiting = out, waiting
        self._folder = out.with_name(f".{out.name}.building")
        self.profile, self.proxy, self.log = (self._folder / n for n in ("profile", "proxy", "shards.log"))
        stats = [(path.name, *_stamp(path)) for path in sorted({t.file for t in checkpoint.tensors.values()})]
        text = json.dumps([inputs, stats], sort_keys=True, default=str)
        self._identity = hashlib.sha256(text.encode()).hexdigest()
        self._lock: BinaryIO | None = None

    def __enter__(self) -> Workplace:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._acquire()
        identity = self._folder / "inputs.json"
        if not identity.exists() or json.loads(identity.read_text(encoding="utf-8")) != self._identity:
            self._clear()
        self.profile.mkdir(exist_ok=True)
        self.proxy.mkdir(exist_ok=True)
        write_json(identity, self._identity)
        return self

    def _acquire(self) -> BinaryIO:
        while True:
            self._folder.mkdir(exist_ok=True)
            lock = (self._folder / "lock").open("ab")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._waiting()
                fcntl.flock(lock, fcntl.LOCK_EX)
            path = self._folder / "lock"
            if path.exists() and path.stat().st_ino == os.fstat(lock.fileno()).st_ino:
                return lock
            lock.close()  # the other process has finished and removed the folder

    def _clear(self) -> None:
        for path in self._folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def finish(self) -> None:
        """Rename the result into place: the last thing that happens."""
        try:
            if self._out.exists():
                self._out.rmdir()  # it is empty
            self.proxy.rename(self._out)
        except OSError as error:
            raise CheckpointError(f"{self._out} cannot be made: {error.strerror}.") from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an interruption or a full disk the finished layers and shards are worth keeping.
        if kind is None or issubclass(kind, CheckpointError):
            shutil.rmtree(self._folder, ignore_errors=True)
        assert self._lock is not None
        self._lock.close()


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
