"""Proves what is in a folder: that a checkpoint can be used, and that a proxy is what its manifest says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxies.checkpoint import Checkpoint, CheckpointError, TensorInfo, file_sha256, read_json
from proxies.families import family_of_config

MANIFEST = "manifest.json"
SCHEMA = "harness/proxy@1"
_FORMATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


@dataclass(frozen=True)
class VerifyReport:
    """What was verified.

    Attributes:
        files: number of files whose hash is the manifest's.
        tensors: number of tensors that are present, of the right shape and finite.
        compared: number of tensors that were compared with the original's, bit for bit.
    """

    files: int
    tensors: int
    compared: int


def check_loadable(folder: Path | str) -> Checkpoint:
    """Check that a mixture-of-experts checkpoint can be loaded and run, reading every weight once.

    Raises:
        CheckpointError: naming file, tensor and number: a shard is missing or truncated, a tensor is missing, has
            another shape than config.json implies, or holds NaN or infinity; fewer experts than are chosen per
            token; not a mixture of experts.
    """
    checkpoint = Checkpoint.open(folder)
    family = family_of_config(checkpoint.config)
    experts, top_k = family.experts(checkpoint.config), family.top_k(checkpoint.config)
    if top_k > experts:
        raise CheckpointError(
            f"{checkpoint.folder / 'config.json'}: {family.top_k_key} = {top_k}, but there are {experts} experts."
        )
    expected = family.shapes(checkpoint.config)
    for name, shape in expected.items():
        info = checkpoint.tensors.get(name)
        if info is None:
            raise CheckpointError(
                f"{checkpoint.folder} lacks the tensor {name} {list(shape)}, which config.json implies."
            )
        if info.shape != shape:
            raise CheckpointError(
                f"{info.file}: tensor {name} has shape {list(info.shape)}, but config.json implies {list(shape)}."
            )
    extra = sorted(set(checkpoint.tensors) - set(expected))
    if extra:
        where = checkpoint.tensors[extra[0]].file
        raise CheckpointError(f"{where}: tensor {extra[0]} is not part of the model ({len(extra)} such tensors).")
    for info in checkpoint.tensors.values():
        bad = nonfinite(checkpoint, info)
        if bad:
            raise CheckpointError(f"{info.file}: tensor {info.name} holds {bad} values that are NaN or infinite.")
    return checkpoint


def nonfinite(checkpoint: Checkpoint, info: TensorInfo) -> int:
    """Number of NaN and infinite values of a tensor; 0 for dtypes that have none or are not checked (integers, fp8)."""
    import numpy as np

    count = 0
    for chunk in checkpoint.chunks(info.name):
        if info.dtype == "BF16":  # all exponent bits set
            bits = np.frombuffer(chunk, dtype="<u2")
            count += int(((bits & 0x7F80) == 0x7F80).sum())
        elif info.dtype in _FORMATS:
            count += int((~np.isfinite(np.frombuffer(chunk, dtype=_FORMATS[info.dtype]))).sum())
    return count


def verify(folder: Path | str, against: Path | str | None = None) -> VerifyReport:
    """Check a proxy against its manifest, and against its original if that is at hand.

    Args:
        folder: the proxy.
        against: the original.

    Raises:
        CheckpointError: the first thing that is not as the manifest says.
    """
    folder = Path(folder)
    manifest = read_json(folder / MANIFEST)
    if manifest.get("schema") != SCHEMA:
        raise CheckpointError(f"{folder / MANIFEST} has schema {manifest.get('schema')!r}, expected {SCHEMA!r}.")
    for name, digest in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} lacks the file {name}, which its manifest lists.")
        if file_sha256(path) != digest:
            raise CheckpointError(f"{path} is not the file that its manifest lists: the hash differs.")
    checkpoint = check_loadable(folder)
    compared = 0 if against is None else _compare(checkpoint, Checkpoint.open(against), manifest)
    return VerifyReport(len(manifest["files"]), len(checkpoint.tensors), compared)


def _compare(proxy: Checkpoint, original: Checkpoint, manifest: dict[str, Any]) -> int:
    """Compare every tensor with the part of the original that it was cut from; returns their number."""
    family = family_of_config(original.config)
    kept = {int(layer): experts for layer, experts in manifest["kept_experts"].items()}
    for name, info in proxy.tensors.items():
        place = family.place(name)
        if place is None:
            same = _bytes(proxy, info) == _bytes(original, original.tensors[name])
        elif place[1] is not None:
            source = family.rename(name, kept[place[0]][place[1]])
            same = _bytes(proxy, info) == _bytes(original, original.tensors[source])
        else:
            whole, row = _bytes(original, original.tensors[name]), info.nbytes // info.shape[0]
            same = _bytes(proxy, info) == b"".join(whole[e * row : (e + 1) * row] for e in kept[place[0]])
        if not same:
            raise CheckpointError(f"{info.file}: tensor {name} differs from the part of the original it was cut from.")
    return len(proxy.tensors)


def _bytes(checkpoint: Checkpoint, info: TensorInfo) -> bytes:
    return b"".join(checkpoint.chunks(info.name))
