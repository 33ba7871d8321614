"""The builder's spine: checkpoint folder -> profile -> selection -> sliced checkpoint with manifest -> verified."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from proxies.checkpoint import (
    Checkpoint,
    CheckpointError,
    Cut,
    checkpoint_digest,
    copy_companions,
    file_sha256,
    read_json,
    write_checkpoint,
    write_json,
)
from proxies.families import Family, family_of_config
from proxies.profile import Batches, calibration_digest, check_batches, profile
from proxies.select import resolve, select
from proxies.verify import MANIFEST, SCHEMA, check_loadable, verify


def build(
    source: Path,
    out: Path,
    experts: int,
    batches: Batches,
    *,
    strategy_name: str = "facility",
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _all: None,
) -> dict[str, Any]:
    """Build a proxy with fewer experts. The same inputs give the same bytes.

    Args:
        source: checkpoint folder of the original.
        out: folder to make; an earlier result of the same inputs is kept, anything else that is there is an error.
        experts: experts to keep per layer.
        batches: calibration text, `(tokens [B, T] int64, attention_mask or None)`.
        strategy_name: selection strategy.
        options: its options.
        seed: for strategies that draw.
        progress: called with (what, done, all).

    Returns:
        The manifest.

    Raises:
        CheckpointError: the original cannot be used, or the request does not fit it; `out` is then untouched.
    """
    source, out = Path(source), Path(out)
    settings = resolve(strategy_name, options)
    checkpoint = check_loadable(source)
    family = family_of_config(checkpoint.config)
    check_request(checkpoint, family, experts)
    check_batches(batches, checkpoint.config["vocab_size"])
    inputs = {
        "source_digest": checkpoint_digest(source),
        "experts": experts,
        "strategy": strategy_name,
        "options": settings,
        "seed": seed,
        "calibration": calibration_digest(batches),
    }
    existing = _existing(out, inputs)
    if existing is not None:
        return existing
    measured = profile(source, batches, lambda done, total: progress("profiling the layers", done, total))
    kept = select(measured, experts, strategy_name, options=settings, seed=seed)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        config = family.with_experts(checkpoint.config, experts)
        write_checkpoint(temporary, cuts(checkpoint, family, kept), config)
        copy_companions(checkpoint, temporary)
        manifest = _manifest(temporary, source, checkpoint, inputs, kept)
        write_json(temporary / MANIFEST, manifest)
        verify(temporary, against=source)
        _settle(temporary, out, inputs)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return manifest


def check_request(checkpoint: Checkpoint, family: Family, experts: int) -> None:
    """Refuse a number of experts that the model cannot have.

    Raises:
        CheckpointError: fewer than are chosen per token, or not fewer than there are.
    """
    have, top_k = family.experts(checkpoint.config), family.top_k(checkpoint.config)
    if experts < top_k:
        raise CheckpointError(f"{experts} experts cannot be kept: {family.top_k_key} = {top_k} are chosen per token.")
    if experts >= have:
        raise CheckpointError(f"{experts} experts cannot be kept: {checkpoint.folder} has {have}, keep fewer.")


def cuts(checkpoint: Checkpoint, family: Family, kept: Mapping[int, list[int]]) -> list[Cut]:
    """The tensors of the proxy: kept experts renumbered, router rows sliced, everything else as it is."""
    result = []
    for name, info in checkpoint.tensors.items():
        place = family.place(name)
        if place is None:
            result.append(Cut(name, info))
        elif place[1] is None:
            result.append(Cut(name, info, tuple(kept[place[0]])))
        elif place[1] in kept[place[0]]:
            result.append(Cut(family.rename(name, kept[place[0]].index(place[1])), info))
    return result


def _existing(out: Path, inputs: dict[str, Any]) -> dict[str, Any] | None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if (out / MANIFEST).is_file():
        manifest = read_json(out / MANIFEST)
        if all(manifest.get(key) == value for key, value in inputs.items()):
            verify(out)
            return manifest
    raise CheckpointError(f"{out} already exists and is not this proxy; remove it or choose another folder.")


def _settle(temporary: Path, out: Path, inputs: dict[str, Any]) -> None:
    try:
        temporary.rename(out)
    except OSError:  # another process may have finished the same proxy meanwhile
        if _existing(out, inputs) is None:
            raise


def _manifest(
    folder: Path, source: Path, checkpoint: Checkpoint, inputs: dict[str, Any], kept: Mapping[int, list[int]]
) -> dict[str, Any]:
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return {
        "schema": SCHEMA,
        "source": str(source.resolve()),
        **inputs,
        "kept_experts": {str(layer): experts for layer, experts in kept.items()},
        "parameters": {"original": checkpoint.parameters, "proxy": Checkpoint.open(folder).parameters},
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        },
        "files": {name: file_sha256(folder / name) for name in files},
    }
