"""Lazy reader of (sharded) safetensors checkpoint folders.

Nothing here needs torch: tensors travel as bytes, so every dtype survives unchanged and the largest buffer held
is one chunk of `CHUNK` bytes. Shards are read with `pread` and not mapped into memory, because mapped pages count
as resident memory. Format: https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON
header, tightly packed data).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK = 16 * 1024 * 1024
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER = 100_000_000  # the safetensors library refuses longer headers

# Bytes per element of the dtypes that can be cut by rows.
DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip

# Type of the bits, and the mask of bits that are all set in NaN and infinity (for E4M3 in NaN alone).
_EXPONENT: dict[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000), "F32": ("<u4", 0x7F80_0000), "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80), "F8_E4M3": ("u1", 0x7F), "F8_E5M2": ("u1", 0x7C),
}  # fmt: skip

# Small files that travel with the weights. Pickles (*.bin, *.pt) never do; code (*.py) where config.json refers to it.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
# Keys of config.json that say nothing about the function the model computes.
_CONFIG_NOISE = frozenset({"transformers_version", "_name_or_path"})


class CheckpointError(ValueError):
    """A checkpoint folder, or a request about one, cannot be used; the message is one sentence for people."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor on disk: `shape` and safetensors `dtype`, and the byte range [begin, end) of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return self.end - self.begin

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Cut:
    """One tensor of a new checkpoint: `name` there, and the source tensor with the `rows` kept (None: all).

    `rows` lie along dimension `axis`; the dimensions before it must be of size one.
    """

    name: str
    source: TensorInfo
    rows: tuple[int, ...] | None = None
    axis: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the new checkpoint."""
        shape = self.source.shape
        return shape if self.rows is None else (*shape[: self.axis], len(self.rows), *shape[self.axis + 1 :])

    @property
    def nbytes(self) -> int:
        """Size in the new checkpoint, in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.source.dtype]

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes in order, at most `CHUNK` at a time."""
        if self.rows is None:
            yield from _pread(self.source.file, self.source.begin, self.source.end)
            return
        row = self.source.nbytes // self.source.shape[self.axis]
        for index in self.rows:
            begin = self.source.begin + index * row
            yield from _pread(self.source.file, begin, begin + row)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint folder: its `config` and where every tensor lies; no tensor data is held."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @classmethod
    def open(cls, folder: Path | str) -> Checkpoint:
        """Read config, index and shard headers, and check that they agree with each other.

        Args:
            folder: a folder with config.json and model.safetensors, or an index and its shards.

        Raises:
            CheckpointError: something is missing, truncated, corrupt or named twice.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; a checkpoint folder with config.json is needed.")
        config = read_json(folder / "config.json")
        return cls(folder, config, _read_tensors(folder))

    @property
    def parameters(self) -> int:
        """Number of elements over all tensors on disk."""
        return sum(info.numel for info in self.tensors.values())

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of tensor `name`, at most `CHUNK` at a time."""
        info = self.tensors[name]
        yield from _pread(info.file, info.begin, info.end)

    @property
    def table_digest(self) -> str:
        """Hexadecimal sha256 of config.json and of every tensor's name, dtype and shape; reads no weights."""
        table = [[n, info.dtype, list(info.shape)] for n, info in sorted(self.tensors.items())]
        return hashlib.sha256(json.dumps([self.config, table], sort_keys=True).encode()).hexdigest()

    def companions(self) -> list[Path]:
        """Files beside the weights that belong to the model (tokenizer, templates, code), relative, sorted."""
        patterns = (*_COMPANIONS, "*.py") if self.config.get("auto_map") else _COMPANIONS
        found = {path for pattern in patterns for path in self.folder.glob(pattern) if path.is_file()}
        return sorted(path.relative_to(self.folder) for path in found)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is missing, is not JSON, or is not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}; is it a checkpoint folder?") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise CheckpointError(f"{path} is not valid JSON ({error.msg} at {where}).") from None
    except (UnicodeDecodeError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}).") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__} where an object is needed.")
    return value


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented UTF-8 JSON with sorted keys: equal values give equal bytes."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def file_sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file's bytes."""
    digest = hashlib.sha256()
    for chunk in _pread(path, 0, path.stat().st_size):
        digest.update(chunk)
    return digest.hexdigest()


def read_into(info: TensorInfo, memory: Any) -> None:
    """Read a tensor's bytes into writable memory of the same size (a uint8 array), without a copy in between."""
    view = memoryview(memory)
    descriptor = os.open(info.file, os.O_RDONLY)
    try:
        done = 0
        while done < info.nbytes:
            count = os.preadv(descriptor, [view[done : done + CHUNK]], info.begin + done)
            if not count:
                raise CheckpointError(f"{info.file} ended within tensor {info.name}; it changed while read.")
            done += count
    finally:
        os.close(descriptor)


def nonfinite_in(memory: Any, dtype: str) -> int:
    """Number of NaN and infinite values in the bytes of a tensor; 0 for dtypes that have none.

    Args:
        memory: bytes, or a uint8 array.
        dtype: safetensors' name of the type. Of the fp8 types E4M3 has NaN only, E5M2 both (arXiv 2209.05433).
    """
    import numpy as np

    count = 0
    for start in range(0, len(memory), CHUNK):
        part = memory[start : start + CHUNK]
        if dtype in _EXPONENT:
            kind, mask = _EXPONENT[dtype]
            bits = np.frombuffer(part, dtype=kind)
            count += int(np.count_nonzero((bits & mask) == mask))
    return count


def checkpoint_digest(folder: Path | str) -> str:
    """Hexadecimal sha256 of what a checkpoint computes: tensors and model configuration.

    Covers every tensor's name, dtype, shape and bytes, in order of name, and config.json without the keys that do
    not reach the model. Sharding, file times, tokenizer and the order of keys make no difference.
    """
    checkpoint = Checkpoint.open(folder)
    config = {key: value for key, value in checkpoint.config.items() if key not in _CONFIG_NOISE}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, info in sorted(checkpoint.tensors.items()):
        digest.update(json.dumps([name, info.dtype, list(info.shape)]).encode())
        for chunk in checkpoint.chunks(name):
            digest.update(chunk)
    return digest.hexdigest()


def _read_tensors(folder: Path) -> dict[str, TensorInfo]:
    index_path, single = folder / INDEX, folder / SINGLE
    if index_path.exists() and single.exists():
        raise CheckpointError(f"{folder} holds both {SINGLE} and {INDEX}; remove the one that is stale.")
    if single.exists():
        return _read_header(single)
    if not index_path.exists():
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
            raise CheckpointError(f"{folder} holds only pickled weights; convert them to safetensors first.")
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}.")
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path} has no weight_map, so it names no shard.")
    return _read_shards(folder, weight_map)


def _read_shards(folder: Path, weight_map: dict[str, Any]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(
                f"{folder / INDEX}: the shard of tensor {name} is {shard!r}, which is not a plain file name."
            )
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            count = sum(file == shard for file in weight_map.values())
            raise CheckpointError(f"{folder} lacks the shard {shard}, which {INDEX} names for {count} tensors.")
        for name, info in _read_header(folder / shard).items():
            if name in tensors:
                where = f"{tensors[name].file.name} and {shard}"
                raise CheckpointError(f"{folder}: tensor {name} is stored twice, in {where}.")
            if name not in weight_map:
                raise CheckpointError(f"{folder / shard} holds the tensor {name}, which {INDEX} does not name.")
            tensors[name] = info
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(f"{folder / shard} lacks the tensor {name}, which {INDEX} places there.")
    return tensors


def _read_header(path: Path) -> dict[str, TensorInfo]:
    size = path.stat().st_size
    if size < 8:
        raise CheckpointError(f"{path} is truncated: {size} bytes, where a safetensors file has at least 8.")
    (length,) = struct.unpack("<Q", b"".join(_pread(path, 0, 8)))
    if length > _MAX_HEADER:
        raise CheckpointError(f"{path} is not a safetensors file: its header would have {length} bytes.")
    if 8 + length > size:
        raise CheckpointError(f"{path} is truncated: {size} bytes, where its header alone needs {8 + length}.")
    try:
        header = json.loads(b"".join(_pread(path, 8, 8 + length)))
        header.pop("__metadata__", None)
        entries = [
            (name, str(e["dtype"]), tuple(int(n) for n in e["shape"]), *map(int, e["data_offsets"]))
            for name, e in header.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path} has a header that is not that of a safetensors file.") from None
    tensors = {}
    expected = 0
    for name, dtype, shape, begin, end in sorted(entries, key=lambda e: e[3:]):
        if dtype not in DTYPE_BYTES:
            raise CheckpointError(f"{path}: tensor {name} has the dtype {dtype}, which is not supported.")
        if begin != expected or end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
            what = f"bytes {begin} to {end} for shape {list(shape)} of {dtype}"
            raise CheckpointError(f"{path}: tensor {name} has inconsistent offsets ({what}).")
        tensors[name] = TensorInfo(name, dtype, shape, path, 8 + length + begin, 8 + length + end)
        expected = end
    if 8 + length + expected != size:
        word = "truncated" if size < 8 + length + expected else "too long"
        raise CheckpointError(f"{path} is {word}: {size} bytes, where its header needs {8 + length + expected}.")
    return tensors


def _pread(path: Path, begin: int, end: int) -> Iterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while begin < end:
            chunk = os.pread(descriptor, min(CHUNK, end - begin), begin)
            if not chunk:
                raise CheckpointError(f"{path} ended at byte {begin}, before byte {end}; it changed while read.")
            begin += len(chunk)
            yield chunk
    finally:
        os.close(descriptor)
