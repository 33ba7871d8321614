"""Which fault is it? The nearest proxy response, and the groups of look-alikes that are told apart together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.fidelity.align import Floats
from harness.fidelity.fingerprint import Ruler, fingerprint
from harness.fidelity.signature import Signature

LARGEST = 4
ALIKE = 1.5
"""Two faults are candidates for one group if they lie less than 1.5 times as far apart as twins of one fault do."""


@dataclass(frozen=True)
class Bankable:
    """Fingerprints of both models by fault."""

    originals: Mapping[str, Floats]
    proxies: Mapping[str, Floats]

    @classmethod
    def of(cls, originals: Mapping[str, Signature], proxies: Mapping[str, Signature]) -> Bankable:
        """Take the fingerprints of the faults that both have."""
        both = [n for n in originals if n in proxies]
        return cls({n: fingerprint(originals[n]) for n in both}, {n: fingerprint(proxies[n]) for n in both})

    @property
    def names(self) -> tuple[str, ...]:
        """The faults."""
        return tuple(self.originals)

    def distances(self, observed: Mapping[str, Floats]) -> Floats:
        """Distances of observed responses to the proxies', the observed fault's own pair left out of the ruler.

        Args:
            observed: By fault, at least all of ``names``; these may be of other seeds.
        """
        found = np.zeros((len(self.names), len(self.names)))
        for i, name in enumerate(self.names):
            ruler = Ruler.fit([(self.originals[n], self.proxies[n]) for n in self.names if n != name])
            found[i] = [ruler.distance(observed[name], self.proxies[n]) for n in self.names]
        return found


def look_alikes(distances: Floats, names: tuple[str, ...]) -> list[list[str]]:
    """Group faults that a distance hardly tells apart: nearest first, at most four in a group.

    Args:
        distances: ``[N, N]``, the original's fault first.
        names: The faults.
    """
    own = np.diag(distances)
    ratio = (distances + distances.T) / (own[:, None] + own[None, :] + 1e-12)
    order = sorted((ratio[i, j], i, j) for i in range(len(names)) for j in range(i) if ratio[i, j] < ALIKE)
    group = {i: [i] for i in range(len(names))}
    for _, i, j in order:
        if group[i] is not group[j] and len(group[i]) + len(group[j]) <= LARGEST:
            joined = group[i] + group[j]
            for member in joined:
                group[member] = joined
    return sorted({tuple(sorted(names[i] for i in g)): None for g in group.values()}, key=lambda g: (-len(g), g))  # type: ignore[arg-type, return-value]


def frozen(path: Path, names: tuple[str, ...], distances: Floats) -> list[int]:
    """Group of each fault, from the file if it exists; otherwise groups are formed, written and so frozen."""
    if not path.exists():
        groups = [list(g) for g in look_alikes(distances, names)]
        path.write_text(json.dumps([g for g in groups if len(g) > 1], indent=1) + "\n")
    groups = json.loads(path.read_text())
    label = {name: i for i, group in enumerate(groups) for name in group}
    return [label.get(name, len(groups) + i) for i, name in enumerate(names)]
