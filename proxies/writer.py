"""Streams a checkpoint folder to disk: shards, index and config, hashed and checked while they are written."""

from __future__ import annotations

import hashlib
import json
import math
import queue
import re
import shutil
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from proxies.checkpoint import DTYPE_BYTES, INDEX, SINGLE, Checkpoint, CheckpointError, Cut, nonfinite_in, write_json

MAX_SHARD_BYTES = 5_000_000_000
_PARTIAL = ".partial"
_WAITING = 4  # chunks that may wait for the second thread


def write_checkpoint(
    folder: Path,
    cuts: Iterable[Cut],
    config: dict[str, Any],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    log: Path | None = None,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> dict[str, str]:
    """Stream tensors and config.json into an existing folder.

    Args:
        folder: where to write; one model.safetensors, or shards with an index when they do not fit one file.
        cuts: the tensors; shards are filled in order of name (numbers compared as numbers).
        config: the content of config.json.
        max_shard_bytes: most tensor bytes per shard; a larger single tensor gets a shard of its own.
        log: file that remembers finished shards; those that it names are not written again.
        progress: called with (bytes written, all bytes).

    Returns:
        sha256 of every weight file, by name.

    Raises:
        CheckpointError: a tensor holds NaN or infinity.
    """
    shards: list[list[Cut]] = [[]]
    size = 0
    for cut in sorted(cuts, key=lambda c: _natural(c.name)):
        if shards[-1] and size + cut.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(cut)
        size += cut.nbytes
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    hashes = _finished(folder, log)
    before, total = 0, sum(c.nbytes for s in shards for c in s)
    for name, shard in zip(names, shards, strict=True):
        if name not in hashes:
            hashes[name] = _write_shard(folder / name, shard, partial(_report, progress, before, total))
            _note(log, name, hashes[name])
        before += sum(c.nbytes for c in shard)
        progress(before, total)
    if count > 1:
        metadata = {"total_parameters": sum(math.prod(c.shape) for s in shards for c in s), "total_size": total}
        weight_map = {cut.name: name for name, shard in zip(names, shards, strict=True) for cut in shard}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})
    write_json(folder / "config.json", config)
    return {name: hashes[name] for name in names}


def _report(progress: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    progress(before + done, total)


def copy_companions(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy tokenizer files, chat templates and the generation config of `checkpoint` into `folder`."""
    for path in checkpoint.companions():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint.folder / path, folder / path)


def _finished(folder: Path, log: Path | None) -> dict[str, str]:
    """The shards that an interrupted run has finished, with their hashes."""
    if log is None or not log.exists():
        return {}
    found = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        name, _, digest = line.partition(" ")
        if (folder / name).is_file() and len(digest) == 64:
            found[name] = digest
    return found


def _note(log: Path | None, name: str, digest: str) -> None:
    if log is not None:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{name} {digest}\n")


def _write_shard(path: Path, cuts: list[Cut], progress: Callable[[int], None]) -> str:
    # Wider dtypes first keeps every tensor aligned, as the safetensors library does.
    cuts = sorted(cuts, key=lambda c: (-DTYPE_BYTES[c.source.dtype], _natural(c.name)))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for cut in cuts:
        span = [offset, offset + cut.nbytes]
        header[cut.name] = {"dtype": cut.source.dtype, "shape": list(cut.shape), "data_offsets": span}
        offset += cut.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(path.name + _PARTIAL)
    with unfinished.open("wb", buffering=0) as file, _Sink(file) as sink:
        sink.write(struct.pack("<Q", len(text)) + text, None)
        done = 0
        for cut in cuts:
            for chunk in cut.chunks():
                sink.write(chunk, cut)
                done += len(chunk)
            progress(done)
    unfinished.replace(path)
    return sink.digest


class _Sink(AbstractContextManager["_Sink"]):
    """Writes chunks to a file while a second thread hashes them and looks for NaN and infinity.

    Attributes:
        digest: sha256 of all that was written, once the sink is closed.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._waiting: queue.Queue[tuple[bytes, Cut | None] | None] = queue.Queue(_WAITING)
        self._bad: Cut | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._check, daemon=True)
        self._thread.start()
        self.digest = ""

    def write(self, chunk: bytes, cut: Cut | None) -> None:
        """Write a chunk of a tensor, or of the header."""
        self._raise_bad()
        self._waiting.put((chunk, cut))
        view = memoryview(chunk)
        while view:
            view = view[self._file.write(view) :]

    def _check(self) -> None:
        while (item := self._waiting.get()) is not None:
            if self._error is None:  # goes on taking chunks, or the writer would wait for ever
                try:
                    self._look(*item)
                except BaseException as error:  # handed to the writer
                    self._error = error

    def _look(self, chunk: bytes, cut: Cut | None) -> None:
        self._hash.update(chunk)
        if cut is not None and self._bad is None and nonfinite_in(chunk, cut.source.dtype):
            self._bad = cut

    def _raise_bad(self) -> None:
        if self._error is not None:
            raise self._error
        if self._bad is not None:
            source = self._bad.source
            count = sum(nonfinite_in(chunk, source.dtype) for chunk in Cut(source.name, source).chunks())
            raise CheckpointError(f"{source.file}: tensor {source.name} holds {count} values that are NaN or infinite.")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting.put(None)
        self._thread.join()
        self.digest = self._hash.hexdigest()
        if kind is None:
            self._raise_bad()


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
