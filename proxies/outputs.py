"""What every expert of a layer would answer: outputs of all experts on all calibration tokens, and a token sample.

A router sends each token to a few experts; here all experts see all tokens, which costs E / K times the computation of
the ordinary profile and is therefore collected only when a strategy asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OutputRequest:
    """How much of the experts' outputs to keep.

    Attributes:
        tokens: number of calibration tokens in all, from which the sample is drawn.
        sample: most tokens to keep.
        sketch: dimensions of the random projection of an output.
        seed: of the drawn tokens and of the projection.
    """

    tokens: int
    sample: int = 256
    sketch: int = 32
    seed: int = 0


def expert_output(module: Any, expert: int, states: torch.Tensor) -> torch.Tensor:
    """Output [N, H] of one expert for hidden states [N, H], through its own module with a routing weight of one."""
    import torch

    index = torch.full((len(states), 1), expert, device=states.device)
    weights = torch.ones(len(states), 1, dtype=states.dtype, device=states.device)
    output: torch.Tensor
    try:
        output = module(states, index, weights)
    except ValueError:  # LongCat's experts need two choices per token: the same expert again, with no weight
        output = module(states, index.expand(-1, 2), torch.cat([weights, 0 * weights], 1))
    return output


def routing_scores(
    router: Any, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the router thinks of every expert, not only of the chosen ones.

    Scores are the softmax or the sigmoid of the logits, whichever explains the routing weights of the chosen experts
    better (both up to a common factor per token, so that it does not matter whether they were normalised).

    Args:
        router: the router's module, with a `weight` [E, H].
        states: [N, H].
        chosen: [N, K] experts.
        weights: [N, K] their routing weights.

    Returns:
        Logits [N, E] and scores [N, E], float64, and the bias [E] that is added to scores for the choice alone.
    """
    import torch

    matrix = router.weight.detach().double()
    logits = states.detach().double() @ matrix.T
    bias = torch.zeros(len(matrix), dtype=torch.float64, device=logits.device)
    for name, tensor in [*router.named_parameters(), *router.named_buffers()]:
        if tuple(tensor.shape) == (len(matrix),):
            if name == "bias":
                logits = logits + tensor.detach().double()
            elif "correction_bias" in name:
                bias = tensor.detach().double()
    given = weights.detach().double()
    given = given / given.sum(1, keepdim=True).clamp(min=1e-30)
    errors = []
    candidates = (logits.softmax(-1), logits.sigmoid())
    for scores in candidates:
        own = scores.gather(1, chosen)
        errors.append(float((own / own.sum(1, keepdim=True).clamp(min=1e-30) - given).abs().sum()))
    return logits, candidates[errors.index(min(errors))], bias


class OutputSums:
    """Accumulates what all experts answer to all tokens of one layer."""

    def __init__(self, request: OutputRequest, router: Any) -> None:
        import numpy as np

        self._router, self._request, self._seen = router, request, 0
        rng = np.random.default_rng([request.seed, 0])
        size = min(request.sample, request.tokens)
        self._drawn = np.sort(rng.permutation(request.tokens)[:size])
        hidden = router.weight.shape[1]
        matrix = np.random.default_rng([request.seed, 1]).standard_normal((hidden, request.sketch))
        self._projection = matrix / np.sqrt(request.sketch)
        self._parts: dict[str, list[torch.Tensor]] = {}
        self._mean: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None

    def add(self, module: Any, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        """Add tokens: hidden states [N, H], chosen experts [N, K], routing weights [N, K]."""
        import torch

        experts, count = len(self._router.weight), len(states)
        inside = (self._drawn >= self._seen) & (self._drawn < self._seen + count)
        rows = torch.from_numpy(self._drawn[inside] - self._seen)
        self._seen += count
        if self._mean is None or self._norm is None:
            self._mean = torch.zeros(experts, states.shape[1], dtype=torch.float64)
            self._norm = torch.zeros(experts, dtype=torch.float64)
        projection = torch.from_numpy(self._projection)
        sketches = torch.zeros(len(rows), experts, projection.shape[1], dtype=torch.float64)
        for expert in range(experts):
            output = expert_output(module, expert, states).double()
            self._mean[expert] += output.sum(0)
            self._norm[expert] += output.norm(dim=-1).sum()
            sketches[:, expert] = output[rows] @ projection
        chosen, weights = chosen[rows], weights[rows].double()
        logits, scores, bias = routing_scores(self._router, states[rows], chosen, weights)
        routed = torch.zeros_like(scores).scatter_(1, chosen, weights)
        found = {
            "sample_logits": logits,
            "sample_scores": scores,
            "sample_mass": weights.sum(1),
            "sample_outputs": sketches,
            "sample_target": torch.einsum("ne,nes->ns", routed, sketches),
        }
        for name, value in found.items():
            self._parts.setdefault(name, []).append(value.float())
        self._bias = bias

    def fields(self) -> dict[str, torch.Tensor]:
        """The optional fields of a `LayerProfile`."""
        import torch

        assert self._mean is not None
        assert self._norm is not None
        return {
            "mean_output": self._mean / self._seen,
            "output_norm": self._norm / self._seen,
            "choice_bias": self._bias,
            **{name: torch.cat(parts) for name, parts in self._parts.items()},
        }
