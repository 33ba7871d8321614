"""Reading a configuration of any framework as flat keys and values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import UsageError

REFERENCE = re.compile(r"\$\{(?:oc\.select:)?(\.*)([\w.]+)(?:\s*,\s*([^}]*))?\}")
GRPO = {"num_generations", "max_completion_length", "beta", "num_iterations", "epsilon", "loss_type", "scale_rewards"}
HF = {
    "per_device_train_batch_size",
    "learning_rate",
    "max_grad_norm",
    "num_train_epochs",
    "logging_steps",
    "output_dir",
}
DEEPSPEED = {
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "gradient_clipping",
    "zero_allow_untested_optimizer",
}


@dataclass(frozen=True)
class Config:
    """A configuration.

    Attributes:
        path: Where it was read.
        kind: ``verl``, ``deepspeed``, ``hf``, ``grpo``, ``model``, ``harness`` or ``other``.
        values: Scalar or list by dotted key.
        warnings: What could not be resolved.
    """

    path: str
    kind: str
    values: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


def read_config(path: Path) -> Config:
    """Read a YAML or JSON file, or the config.json of a folder.

    Raises:
        UsageError: If it cannot be read, or is not a mapping.
    """
    place = path / "config.json" if path.is_dir() else path
    if place.suffix in (".bin", ".pt", ".pkl"):
        raise UsageError(f"{place} is a pickle, which may run code when it is read; export it as JSON or YAML")
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{place} cannot be read: {getattr(e, 'strerror', None) or 'not text'}") from e
    data = _parse(text, place)
    if not isinstance(data, Mapping):
        raise UsageError(f"{place} is not a mapping of keys to values")
    values, warnings = _resolved(dict(_flat(data, "")))
    return Config(str(place), _kind(data), values, tuple(warnings))


def _parse(text: str, place: Path) -> Any:
    import yaml

    try:
        return json.loads(text) if place.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as e:
        raise UsageError(f"{place} is not {'JSON' if place.suffix == '.json' else 'YAML'}: {e}") from e


def _kind(data: Mapping[Any, Any]) -> str:
    keys = {str(k) for k in data}
    if "actor_rollout_ref" in keys:
        return "verl"
    if keys & DEEPSPEED:
        return "deepspeed"
    if "model_type" in keys or "architectures" in keys:
        return "model"
    if {"rl", "original"} & keys == {"rl", "original"}:
        return "harness"
    if len(keys & GRPO) >= 2:
        return "grpo"
    return "hf" if keys & HF else "other"


def _flat(data: Mapping[Any, Any], before: str) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        else:
            yield name, _scalar(value)


def _scalar(value: Any) -> Any:
    """Return a value as it is meant: YAML 1.1 takes 1e-6 for a string."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+", value):
        return float(value)
    return value


def _resolved(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replace OmegaConf's ``${a.b}`` and ``${oc.select:a.b,default}`` by what they refer to."""
    warnings: list[str] = []
    found = dict(values)
    for key, value in values.items():
        at, seen = key, {key}
        while isinstance(value, str) and (match := REFERENCE.fullmatch(value.strip())):
            target, fallback = _absolute(match[1], match[2], at), match[3]
            if target in seen:
                warnings.append(f"{key}: {value} refers to itself")
                break
            seen.add(target)
            if target in values:
                at, value = target, values[target]
            elif fallback is not None:
                value = _scalar(_plain(fallback))
            else:
                warnings.append(f"{key}: {value} refers to a key that is not in the file; kept as it is")
                break
        found[key] = value
    return found, warnings


def _absolute(dots: str, target: str, key: str) -> str:
    """Return the key that a reference names; each dot before it is one level up from the key that holds it."""
    above = key.split(".")[: -len(dots)] if dots else []
    return ".".join([*above, target])


def _plain(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
