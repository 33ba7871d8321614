"""The words of a signature: what a fault is expected to do to a metric. Pure data, standard library only.

A claim is about the response (faulted minus its clean twin), not about levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from harness.errors import unknown


@dataclass(frozen=True)
class Claim:
    """Base of all claims; use one of the subclasses.

    Attributes:
        metric: Name of the metric, as in a trace.
    """

    metric: str
    phrase: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if type(self) is Claim:
            raise TypeError("a claim needs a word: Falls, Rises, NonFinite, Flat, Zero, Stays, Shifts or Spikes")
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(f"a claim needs the name of a metric, got {self.metric!r}")

    def __str__(self) -> str:
        return f"{self.metric} {self.phrase}"

    def to_dict(self) -> dict[str, str]:
        """Return the claim as plain data: ``{"claim": "Falls", "metric": "reward"}``."""
        return {"claim": type(self).__name__, "metric": self.metric}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Claim:
        """Undo ``to_dict``.

        Raises:
            UsageError: If there is no such claim.
            ValueError: If a key is missing or not known.
        """
        if set(data) != {"claim", "metric"}:
            raise ValueError(f"a claim has the keys 'claim' and 'metric', got {sorted(data)}")
        if data["claim"] not in CLAIMS:
            raise unknown("claim", str(data["claim"]), CLAIMS)
        return CLAIMS[data["claim"]](data["metric"])


@dataclass(frozen=True)
class Falls(Claim):
    """The metric lies below its clean twin, lastingly."""

    phrase: ClassVar[str] = "falls"


@dataclass(frozen=True)
class Rises(Claim):
    """The metric lies above its clean twin, lastingly."""

    phrase: ClassVar[str] = "rises"


@dataclass(frozen=True)
class NonFinite(Claim):
    """The metric becomes NaN or infinite where its clean twin is finite."""

    phrase: ClassVar[str] = "becomes non-finite"


@dataclass(frozen=True)
class Flat(Claim):
    """The metric stops changing: what its clean twin gains or loses over the run is absent."""

    phrase: ClassVar[str] = "stops changing"


@dataclass(frozen=True)
class Zero(Claim):
    """The metric is exactly zero where its clean twin is not."""

    phrase: ClassVar[str] = "becomes zero"


@dataclass(frozen=True)
class Stays(Claim):
    """The metric does not respond: it stays with its clean twin."""

    phrase: ClassVar[str] = "does not respond"


@dataclass(frozen=True)
class Shifts(Claim):
    """The metric responds lastingly, in either direction."""

    phrase: ClassVar[str] = "shifts"


@dataclass(frozen=True)
class Spikes(Claim):
    """The metric leaves its clean twin for single steps and returns."""

    phrase: ClassVar[str] = "spikes"


@dataclass(frozen=True)
class Scatters(Claim):
    """The metric leaves its clean twin, up in one step or seed and down in another."""

    phrase: ClassVar[str] = "scatters"


CLAIMS: dict[str, type[Claim]] = {
    kind.__name__: kind for kind in (Falls, Rises, NonFinite, Flat, Zero, Stays, Shifts, Spikes, Scatters)
}
