"""The one table of metrics that count, and the thresholds of the comparison. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["replay", "free"]


@dataclass(frozen=True)
class Metric:
    """How a metric takes part in the comparison.

    Attributes:
        name: Its name in a trace.
        positive: True if it lives on a positive scale, so that its response is a log ratio; else the response is a
            difference in units of the clean step-to-step spread, compressed (see ``noise``). A metric of which any
            value is negative is treated as a difference whatever the table says.
        primary: True for the metrics that everybody watches.
        structural_in_replay: True if it cannot respond when every arm trains on the same rollouts.
        residue: Value, in the metric's own unit, below which a reading is what rounding leaves of zero.
        still: Change from one step to the next, in the metric's own unit, up to which it counts as frozen.
    """

    name: str
    positive: bool
    primary: bool = False
    structural_in_replay: bool = False
    residue: float = 0.0
    still: float = 0.0

    def observable(self, mode: Mode) -> bool:
        """Say whether the metric can respond at all in a mode."""
        return mode == "free" or not self.structural_in_replay


METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric("loss", positive=False, primary=True),
        Metric("grad_norm", positive=True, primary=True),
        Metric("entropy", positive=True, primary=True),
        Metric("reward", positive=False, structural_in_replay=True),
        Metric("kl", positive=True, residue=1e-6),
        Metric("logprob_gap", positive=True, residue=1e-5),
        Metric("response_length", positive=True, structural_in_replay=True),
        Metric("clip_fraction", positive=False),
        Metric("ratio_mean", positive=False, still=1e-5),
        Metric("ratio_max", positive=True, still=1e-5),
        Metric("update_norm", positive=True),
        Metric("skipped_steps", positive=False),
        Metric("grad_norm/router", positive=True),
        Metric("grad_norm/experts", positive=True),
        Metric("grad_norm/attention", positive=True),
        Metric("grad_norm/norms", positive=True),
        Metric("grad_norm/embedding", positive=True),
        Metric("router_entropy", positive=True),
        Metric("topk_mass", positive=True),
        Metric("expert_imbalance", positive=True),
    )
}


@dataclass(frozen=True)
class Thresholds:
    """Every number that the verdict depends on. See docs/score.md for what they are worth.

    Attributes:
        bar: Least lower bound of the overall fidelity for REPRODUCED.
        partial: Least overall fidelity for PARTIAL.
        min_seeds: Fewest seeds per model; with fewer the verdict is INCONCLUSIVE.
        min_steps: Fewest steps from onset on; with fewer the verdict is INCONCLUSIVE.
        margin_log: Responses within +-this log ratio are of no practical importance (0.02: 2%).
        margin_spread: The same for responses in units of the clean step-to-step spread.
        step_units: Null units that the median seed must exceed in a step for the step to count as a response.
        level_units: Null units of the mean over steps that every seed must exceed, with one sign.
        spread_units: Root mean square, in null units, that the median seed must exceed.
        relevance: Multiple of the margin from which on a metric has its full weight.
        undirected_weight: Factor of the weight of a metric that in neither model responds in a direction.
        primary_weight: Weight of the primary metrics together; the secondary ones have the rest.
        trip_weight: Weight of the agreement of severities to trip, when these are given.
        onset_weight: Weight of the onset lag in a metric's agreement.
        size_weight: Weight of the size ratio in a metric's agreement.
        shape_weight: Weight of the shape in a metric's agreement.
        confidence: Coverage of the interval of the overall fidelity.
    """

    bar: float = 0.70
    partial: float = 0.50
    min_seeds: int = 3
    min_steps: int = 4
    margin_log: float = 0.02
    margin_spread: float = 0.25
    step_units: float = 4.0
    level_units: float = 3.0
    spread_units: float = 3.0
    relevance: float = 5.0
    undirected_weight: float = 0.10
    primary_weight: float = 0.65
    trip_weight: float = 0.20
    onset_weight: float = 0.25
    size_weight: float = 0.40
    shape_weight: float = 0.35
    confidence: float = 0.95

    def margin(self, log: bool) -> float:
        """Return the margin of a response that is (or is not) a log ratio."""
        return self.margin_log if log else self.margin_spread


DEFAULT = Thresholds()
