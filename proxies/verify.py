"""Proves what is in a folder: that a checkpoint can be used, and that a proxy is what its manifest says."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxies.checkpoint import Checkpoint, CheckpointError, TensorInfo, file_sha256, nonfinite_in, read_json
from proxies.cuts import cuts
from proxies.families import Family, family_of_config

MANIFEST = "manifest.json"
SCHEMA = "harness/proxy@1"


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
        CheckpointError: what `check_structure` finds, or a tensor that holds NaN or infinity.
    """
    checkpoint = check_structure(folder)
    for info in checkpoint.tensors.values():
        bad = nonfinite(checkpoint, info)
        if bad:
            raise CheckpointError(f"{info.file}: tensor {info.name} holds {bad} values that are NaN or infinite.")
    return checkpoint


def check_structure(folder: Path | str) -> Checkpoint:
    """Check that a mixture-of-experts checkpoint has the tensors that its configuration implies; reads no weights.

    Raises:
        CheckpointError: naming file, tensor and number: a shard is missing or truncated, a tensor is missing or has
            another shape than config.json implies; fewer experts than are chosen per token; not a mixture of experts.
    """
    checkpoint = Checkpoint.open(folder)
    family = family_of_config(checkpoint.config)
    experts, top_k = family.experts(checkpoint.config), family.top_k(checkpoint.config)
    if top_k > experts:
        raise CheckpointError(
            f"{checkpoint.folder / 'config.json'}: {family.top_k_key} = {top_k}, but there are {experts} experts."
        )
    expected = set()
    for name, shape in family.shapes(checkpoint.config):
        expected.add(name)
        info = checkpoint.tensors.get(name)
        if info is None and name + "_blocks" in checkpoint.tensors:
            continue  # MXFP4: blocks and scales in place of the matrix
        if info is None:
            raise CheckpointError(
                f"{checkpoint.folder} lacks the tensor {name} {list(shape)}, which config.json implies."
            )
        if info.shape != shape:
            raise CheckpointError(
                f"{info.file}: tensor {name} has shape {list(info.shape)}, but config.json implies {list(shape)}."
            )
    if not family.moe_layers(checkpoint.config):
        raise CheckpointError(f"{checkpoint.folder / 'config.json'} leaves every layer dense: there are no experts.")
    extra = sorted(n for n in set(checkpoint.tensors) - expected if not _may_be_there(checkpoint, family, n))
    if extra:
        where = checkpoint.tensors[extra[0]].file
        raise CheckpointError(f"{where}: tensor {extra[0]} is not part of the model ({len(extra)} such tensors).")
    return checkpoint


def _may_be_there(checkpoint: Checkpoint, family: Family, name: str) -> bool:
    """Whether a tensor that the architecture does not have is one that its checkpoints may hold."""
    block_scaled = name.endswith("_scale_inv") and name.removesuffix("_scale_inv") in checkpoint.tensors
    packed = name.endswith(("_blocks", "_scales")) and family.place(name) is not None
    spare = re.fullmatch(family.spare_tensors, name) is not None
    return spare or block_scaled or packed or family.beyond_the_layers(checkpoint.config, name)


def nonfinite(checkpoint: Checkpoint, info: TensorInfo) -> int:
    """Number of NaN and infinite values of a tensor."""
    return sum(nonfinite_in(chunk, info.dtype) for chunk in checkpoint.chunks(info.name))


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
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{folder / MANIFEST} has no list of files.")
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} lacks the file {name}, which its manifest lists.")
        if file_sha256(path) != digest:
            raise CheckpointError(f"{path} is not the file that its manifest lists: the hash differs.")
    checkpoint = check_loadable(folder)
    compared = 0 if against is None else _compare(checkpoint, Checkpoint.open(against), manifest)
    return VerifyReport(len(files), len(checkpoint.tensors), compared)


def _compare(proxy: Checkpoint, original: Checkpoint, manifest: dict[str, Any]) -> int:
    """Compare every tensor with the part of the original that it was cut from; returns their number."""
    family = family_of_config(original.config)
    counts = family.experts(proxy.config), family.experts(original.config)
    kept = _kept(proxy, family.moe_layers(original.config), *counts, manifest)
    expected = {cut.name: cut for cut in cuts(original, family, kept, manifest.get("kept_layers"))}
    for name, info in proxy.tensors.items():
        cut = expected.pop(name, None)
        if cut is None:
            raise CheckpointError(f"{info.file}: tensor {name} was not cut from anything in the original.")
        if _digest(proxy.chunks(name)) != _digest(cut.chunks()):
            raise CheckpointError(f"{info.file}: tensor {name} differs from the part of the original it was cut from.")
    if expected:
        raise CheckpointError(f"{proxy.folder} lacks the tensor {min(expected)}, which the original has.")
    return len(proxy.tensors)


def _kept(
    proxy: Checkpoint, layers: list[int], keep: int, experts: int, manifest: dict[str, Any]
) -> dict[int, list[int]]:
    """The kept experts of every layer, after checking that each lists `keep` different ones of `experts`."""
    listed = manifest.get("kept_experts")
    kept = {}
    for layer in layers:
        indices = listed.get(str(layer)) if isinstance(listed, dict) else None
        valid = {e for e in indices if type(e) is int and 0 <= e < experts} if isinstance(indices, list) else set()
        if not isinstance(indices, list) or not len(valid) == len(indices) == keep:
            raise CheckpointError(f"{proxy.folder / MANIFEST} does not list {keep} kept experts for layer {layer}.")
        kept[layer] = indices
    return kept


def _digest(chunks: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.digest()
