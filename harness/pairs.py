"""Prepares the two models of a pair: train or check the original, build or check the proxy, pass the ability gate."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError, UsageError
from harness.spec import PairSpec

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Prepared:
    """A model that is ready to run.

    Attributes:
        folder: Its checkpoint.
        digest: Digest of its weights and configuration.
    """

    folder: Path
    digest: str


class AbilityError(HarnessError):
    """The proxy is not able enough to stand in for the original: exit code 1."""

    exit_code = 1


def prepare(pair: PairSpec, home: Path, progress: Progress) -> dict[str, Prepared]:
    """Return both models of a pair, made if they are not there yet.

    Args:
        pair: The pair.
        home: Where originals, proxies and scores are cached.
        progress: Called with (what is being done, done, all).

    Returns:
        ``original`` and ``proxy``.

    Raises:
        UsageError: If a named folder is not a checkpoint that can be used.
        AbilityError: If the proxy does not pass the gate.
    """
    models = make(pair, home, progress)
    ability(pair, models, home, progress)
    return models


def make(pair: PairSpec, home: Path, progress: Progress) -> dict[str, Prepared]:
    """Do what ``prepare`` does, without asking whether the proxy is able."""
    original = _original(pair, home, progress)
    return {"original": original, "proxy": _proxy(pair, original, home, progress)}


def _checked(folder: Path) -> Prepared:
    from proxies.checkpoint import CheckpointError, checkpoint_digest
    from proxies.verify import check_loadable

    try:
        check_loadable(folder)
        return Prepared(folder, checkpoint_digest(folder))
    except CheckpointError as e:
        raise UsageError(str(e)) from e


def _original(pair: PairSpec, home: Path, progress: Progress) -> Prepared:
    if pair.original.folder is not None:
        return _checked(Path(pair.original.folder))
    from harness.rl.originals import ensure_original

    assert pair.original.recipe is not None
    folder = ensure_original(
        pair.original.recipe, home, lambda step, total, _loss: progress("training the original", step, total)
    )
    return _checked(folder)


def _proxy(pair: PairSpec, original: Prepared, home: Path, progress: Progress) -> Prepared:
    from proxies.checkpoint import CheckpointError

    spec = pair.proxy
    if spec.folder is not None:
        _check_manifest(Path(spec.folder))
        return _checked(Path(spec.folder))
    assert spec.experts is not None
    identity = json.dumps([original.digest, spec.model_dump(exclude={"ability_floor"}), _builder_digest()])
    out = home / "proxies" / f"{pair.name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if not (out / "manifest.json").exists():
        from harness.calibration import load_tokenizer
        from harness.rl.tasks import calibration_batches
        from proxies.build import build

        tokenizer = load_tokenizer(original.folder)
        batches = calibration_batches(pair.task, tokenizer, spec.calibration_sequences, seed=0)
        try:
            build(original.folder, out, spec.experts, batches, strategy_name=spec.strategy)
        except CheckpointError as e:
            raise UsageError(str(e)) from e
    return _checked(out)


def _check_manifest(folder: Path) -> None:
    """Refuse a proxy whose manifest does not match its files; a folder without one is taken as it is."""
    from proxies.checkpoint import CheckpointError
    from proxies.verify import verify

    if (folder / "manifest.json").exists():
        try:
            verify(folder)
        except CheckpointError as e:
            raise UsageError(str(e)) from e


def _builder_digest() -> str:
    import proxies

    root = Path(proxies.__file__).parent
    sources = [p.read_bytes() for p in sorted(root.rglob("*.py"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()


def ability(pair: PairSpec, models: dict[str, Prepared], home: Path, progress: Progress) -> dict[str, float]:
    """Score both models on the pair's task and refuse a proxy that cannot do it.

    Returns:
        Exact-match rate of ``original``, ``proxy`` and ``chance``.

    Raises:
        AbilityError: If the gate says no.
    """
    from harness.rl import ability as gate

    found = rates(pair, models, home, progress)
    reason = gate.refusal(found, floor=pair.proxy.ability_floor)
    if reason is not None:
        raise AbilityError(f"the proxy of pair {pair.name} fails the ability gate: {reason}")
    return found


def rates(pair: PairSpec, models: dict[str, Prepared], home: Path, progress: Progress) -> dict[str, float]:
    """Score both models on the pair's task, or read what was scored before; see ``ability``."""
    from harness.rl import ability as gate

    identity = [m.digest for m in models.values()] + [pair.task.model_dump(), pair.rl.temperature]
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    path = home / "ability" / f"{name}.json"
    if path.exists():
        found: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
        return found
    progress("scoring both models", 0, 1)
    found = gate.rates({k: m.folder for k, m in models.items()}, pair.task, pair.rl.temperature)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(found), encoding="utf-8")
    temporary.replace(path)
    return found
