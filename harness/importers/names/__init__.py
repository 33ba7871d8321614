"""Which native metric is which canonical one, per framework: YAML data with an order of precedence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from harness.errors import UsageError, unknown

CANONICAL = (
    "loss",
    "grad_norm",
    "entropy",
    "kl",
    "reward",
    "response_length",
    "logprob_gap",
    "clip_fraction",
    "lr",
)


@dataclass(frozen=True)
class NameMap:
    """Names of one framework.

    Attributes:
        framework: Its name.
        versions: Versions that it was read from.
        metrics: Native names by canonical name, the preferred one first.
    """

    framework: str
    versions: str
    metrics: Mapping[str, tuple[str, ...]]

    @property
    def natives(self) -> frozenset[str]:
        """All native names that mean something, canonical ones included."""
        return frozenset(n for found in self.metrics.values() for n in found) | frozenset(self.metrics)

    def with_choices(self, chosen: Mapping[str, str]) -> NameMap:
        """Return the map with canonical names pointed elsewhere."""
        return NameMap(self.framework, self.versions, {**self.metrics, **{c: (n,) for c, n in chosen.items()}})


@cache
def load(framework: str) -> NameMap:
    """Read the map of a framework."""
    import yaml

    data = yaml.safe_load((files(__package__) / f"{framework}.yaml").read_text(encoding="utf-8"))
    return NameMap(data["framework"], str(data["versions"]), {c: tuple(n) for c, n in data["metrics"].items()})


def choices(words: list[str]) -> dict[str, str]:
    """Parse ``canonical=native`` words.

    Raises:
        UsageError: If a word is not of that form or the canonical name is none.
    """
    found = {}
    for word in words:
        canonical, equals, native = word.partition("=")
        if not equals or not native:
            raise UsageError(f"--map {word!r} is not of the form canonical=native, for example loss=actor/pg_loss")
        if canonical not in CANONICAL:
            raise unknown("canonical metric in --map:", canonical, CANONICAL)
        found[canonical] = native
    return found
