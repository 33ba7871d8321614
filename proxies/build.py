"""The builder's spine: checkpoint folder -> profile -> selection -> sliced checkpoint with manifest -> verified."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from proxies.checkpoint import Checkpoint, CheckpointError, file_sha256, read_json, write_json
from proxies.cuts import check_request, cuts
from proxies.depth import check_shallower, most_influential, shallower
from proxies.families import family_of_config
from proxies.profile import Batches, Profile, calibration_digest, check_batches, profile
from proxies.profile_of_weights import profile_of_weights
from proxies.search import SearchContext
from proxies.select import needs_outputs, needs_profile, resolve, searches, select
from proxies.verify import MANIFEST, SCHEMA, check_structure, verify
from proxies.workplace import Workplace
from proxies.writer import MAX_SHARD_BYTES, copy_companions, write_checkpoint

Progress = Callable[[str, int, int], None]


def build(
    source: Path,
    out: Path,
    experts: int,
    batches: Batches | None,
    *,
    strategy_name: str = "facility",
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    measured: Profile | None = None,
    dtype: Any = None,
    budget: int | None = None,
    layers: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    read_back: bool = True,
    progress: Progress = lambda _what, _done, _all: None,
    note: Callable[[str], None] = lambda _text: None,
) -> dict[str, Any]:
    """Build a proxy with fewer experts. The same inputs give the same bytes; an interrupted build goes on where it was.

    Args:
        source: checkpoint folder of the original.
        out: folder to make; an earlier result of the same inputs is kept, anything else that is there is an error.
        experts: experts to keep per layer.
        batches: calibration text, `(tokens [B, T] int64, attention_mask or None)`; None selects by the weights alone.
        strategy_name: selection strategy.
        options: its options.
        seed: for strategies that draw.
        measured: a profile that was made before; `batches` then serve only a strategy that tries selections.
        dtype: torch dtype to profile in; None for the checkpoint's own. The proxy keeps the original's.
        budget: bytes of hidden states held in memory while profiling, the rest waits on disk; None for no limit.
        layers: decoder layers to keep, by block influence; None for all.
        max_shard_bytes: most tensor bytes per file.
        read_back: read the result once more and compare it with the original, bit for bit.
        progress: called with (what, done, all).
        note: called with what the user should know, such as that the whole model has to be loaded.

    Returns:
        The manifest.

    Raises:
        CheckpointError: the original cannot be used, or the request does not fit it; `out` is then untouched.
    """
    source, out = Path(source), Path(out)
    settings = resolve(strategy_name, options)
    checkpoint = check_structure(source)
    family = family_of_config(checkpoint.config)
    check_request(checkpoint, family, experts)
    if batches is not None:
        check_batches(batches, checkpoint.config["vocab_size"])
    inputs = {
        "source_digest": checkpoint.table_digest,
        "experts": experts,
        "strategy": strategy_name,
        "options": settings,
        "seed": seed,
        "layers": layers,
        "profile_dtype": None if dtype is None else str(dtype),
        "calibration": calibration_digest(batches) if measured is None else measured.calibration,
        "search_calibration": calibration_digest(batches) if searches(strategy_name) else None,
    }
    with Workplace(out, checkpoint, inputs, lambda: progress("waiting for another build", 0, 1)) as place:
        existing = _existing(out, source, inputs)
        if existing is not None:
            return existing
        if measured is None:
            how = {"dtype": dtype, "budget": budget, "work": place.profile, "note": note}
            measured = _measure(checkpoint, strategy_name, batches, progress, how)
        context = partial(_context, source, measured, batches, family.groups(checkpoint.config), progress)
        kept = select(
            measured, experts, strategy_name, options=settings, seed=seed,
            groups=family.groups(checkpoint.config), group_top=family.group_top, context=context,
        )  # fmt: skip
        config = family.with_experts(checkpoint.config, experts)
        kept_layers = None if layers is None else most_influential(measured.influence, layers)
        chosen = cuts(checkpoint, family, kept, kept_layers)
        if kept_layers is not None:
            config = shallower(config, kept_layers)
            check_shallower(checkpoint, family, config, chosen)
        tell = partial(progress, "writing the proxy")
        hashes = write_checkpoint(place.proxy, chosen, config, max_shard_bytes, log=place.log, progress=tell)
        copy_companions(checkpoint, place.proxy)
        manifest = _manifest(place.proxy, source, checkpoint, inputs, kept, hashes)
        manifest["kept_layers"] = kept_layers
        manifest["smallest_for_mass"] = measured.smallest_for_mass(family.top_k(checkpoint.config))
        write_json(place.proxy / MANIFEST, manifest)
        if read_back:
            progress("reading the proxy back", 0, 1)
            verify(place.proxy, against=source)
        place.finish()
    return manifest


def _measure(
    checkpoint: Checkpoint, strategy_name: str, batches: Batches | None, progress: Progress, how: dict[str, Any]
) -> Profile:
    if not needs_profile(strategy_name) or batches is None:
        return profile_of_weights(checkpoint, norms=needs_profile(strategy_name))
    outputs, tell = needs_outputs(strategy_name), partial(progress, "profiling the layers")
    return profile(checkpoint.folder, batches, tell, outputs=outputs, **how)


def _context(
    source: Path, measured: Profile, batches: Batches | None, groups: int, progress: Progress
) -> SearchContext:
    """The whole model to try selections on; loaded only for a strategy that searches."""
    if batches is None:
        raise CheckpointError("a strategy that tries selections on the model needs calibration text for it.")
    tell = lambda done: progress("trying selections", done, 0)  # noqa: E731 - one line, used once
    return SearchContext.load(source, measured, batches, groups=groups, progress=tell)


def _existing(out: Path, source: Path, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of what lies in `out`, if it is this proxy: same inputs, and bit for bit cut from this original."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if (out / MANIFEST).is_file():
        manifest = read_json(out / MANIFEST)
        if all(manifest.get(key) == value for key, value in inputs.items()):
            verify(out, against=source)
            return manifest
    raise CheckpointError(f"{out} already exists and is not this proxy; remove it or choose another folder.")


def _manifest(
    folder: Path,
    source: Path,
    checkpoint: Checkpoint,
    inputs: dict[str, Any],
    kept: Mapping[int, list[int]],
    hashes: Mapping[str, str],
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
        "files": {name: hashes.get(name) or file_sha256(folder / name) for name in files},
    }
