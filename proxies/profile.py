"""What the experts of a checkpoint do on calibration text: the numbers that a selection is based on."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxies.checkpoint import Checkpoint, CheckpointError
from proxies.families import Family, family_of_config, positive_int
from proxies.outputs import OutputSums, expert_output

if TYPE_CHECKING:
    import torch


Batches = Sequence["tuple[torch.Tensor, torch.Tensor | None]"]


@dataclass(frozen=True)
class LayerProfile:
    """One layer's experts on calibration text, all float64. `E` experts, `H` hidden size.

    Attributes:
        router: [E, H] router rows.
        frequency: [E] number of tokens routed to each expert.
        weight: [E] sum of the routing weights over those tokens.
        coactivation: [E, E] number of tokens routed to both experts; the diagonal is `frequency`.
        context: [E, H] sum over routed tokens of routing weight times hidden state; divided by `weight` it is the
            prototype of what the expert sees.
        saliency: [E] sum over routed tokens of routing weight times L2 norm of the expert's output. Divided by
            `frequency` it is the criterion of REAP (arXiv 2510.13999).
        mean_output: [E, H] output of each expert, unweighted, averaged over all tokens; None, like everything
            below, unless outputs were asked for.
        output_norm: [E] L2 norm of that output, averaged over all tokens.
        choice_bias: [E] what the router adds to its scores for the choice of experts alone.
        sample_logits: [N, E] float32 router logits of a sample of `N` tokens.
        sample_scores: [N, E] float32 what the routing weights are made of: softmax or sigmoid of the logits.
        sample_mass: [N] float32 sum of a token's routing weights.
        sample_outputs: [N, E, S] float32 random projection to `S` dimensions of every expert's output.
        sample_target: [N, S] float32 the same projection of what the layer's routed experts put out together.
    """

    router: torch.Tensor
    frequency: torch.Tensor
    weight: torch.Tensor
    coactivation: torch.Tensor
    context: torch.Tensor
    saliency: torch.Tensor
    mean_output: torch.Tensor | None = None
    output_norm: torch.Tensor | None = None
    choice_bias: torch.Tensor | None = None
    sample_logits: torch.Tensor | None = None
    sample_scores: torch.Tensor | None = None
    sample_mass: torch.Tensor | None = None
    sample_outputs: torch.Tensor | None = None
    sample_target: torch.Tensor | None = None

    @property
    def experts(self) -> int:
        """Number of experts."""
        return int(self.router.shape[0])

    def part(self, experts: list[int]) -> LayerProfile:
        """The profile of some experts only, in the order given, as if there were no others."""
        tensors: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None or f.name in ("sample_mass", "sample_target"):
                tensors[f.name] = value
            elif f.name in ("sample_logits", "sample_scores", "sample_outputs"):
                tensors[f.name] = value[:, experts]
            elif f.name == "coactivation":
                tensors[f.name] = value[experts][:, experts]
            else:
                tensors[f.name] = value[experts]
        return LayerProfile(**tensors)


@dataclass(frozen=True)
class Profile:
    """The profile of a checkpoint: layer index to profile, and what it was measured on.

    Attributes:
        layers: one profile per layer that has experts.
        tokens: number of calibration tokens.
        calibration: sha256 of the calibration tokens.
        topk_mass: layer to the mean softmax mass of the chosen experts, in (0, 1]; empty where nothing was run, and for
            routers that are no softmax.
        influence: layer to its block influence, 1 - mean cosine between the states that enter and leave it, in [0, 2];
            also of layers without experts; empty where nothing was run.
    """

    layers: dict[int, LayerProfile]
    tokens: int
    calibration: str
    topk_mass: Mapping[int, float] = field(default_factory=dict)
    influence: Mapping[int, float] = field(default_factory=dict)

    def smallest_for_mass(self, top_k: int) -> int | None:
        """Fewest experts with which the top-k mass can be as small as it is in the original; None if not measured.

        A softmax over K experts gives its k largest at least k / K of the mass, so a fault that acts on that mass (say,
        a missing renormalisation) keeps its size only if K is at least k divided by the original's mass.
        """
        if not self.topk_mass:
            return None
        return math.ceil(top_k / (sum(self.topk_mass.values()) / len(self.topk_mass)) - 1e-9)

    def save(self, path: Path) -> None:
        """Write as safetensors, so that proxies of several sizes can be selected from one profile."""
        from safetensors.torch import save_file

        named = {f"{i}.{f.name}": getattr(p, f.name) for i, p in self.layers.items() for f in fields(p)}
        tensors = {name: tensor.contiguous() for name, tensor in named.items() if tensor is not None}
        about = {"tokens": str(self.tokens), "calibration": self.calibration}
        about |= {"topk_mass": json.dumps(self.topk_mass), "influence": json.dumps(self.influence)}
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        save_file(tensors, temporary, metadata=about)
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read what `save` wrote."""
        from safetensors import safe_open

        layers: dict[int, dict[str, Any]] = {}
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            for key in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                index, _, name = key.partition(".")
                layers.setdefault(int(index), {})[name] = file.get_tensor(key)
        profiles = {i: LayerProfile(**tensors) for i, tensors in sorted(layers.items())}
        mass, influence = (
            {int(i): float(m) for i, m in json.loads(metadata[key]).items()} for key in ("topk_mass", "influence")
        )
        return cls(profiles, int(metadata["tokens"]), metadata["calibration"], mass, influence)


class LayerSums:
    """Accumulates one layer's profile from what passes its router and its experts."""

    def __init__(self, experts: int, hidden: int, outputs: OutputSums | None = None) -> None:
        import torch

        self.outputs = outputs
        self.frequency = torch.zeros(experts, dtype=torch.float64)
        self.weight = torch.zeros(experts, dtype=torch.float64)
        self.coactivation = torch.zeros(experts, experts, dtype=torch.float64)
        self.context = torch.zeros(experts, hidden, dtype=torch.float64)
        self.saliency = torch.zeros(experts, dtype=torch.float64)

    def add(self, module: Any, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        """Add tokens: hidden states [N, H], chosen experts [N, K], routing weights [N, K]."""
        import torch

        hit = torch.zeros(len(states), len(self.frequency), dtype=torch.float64).scatter_(1, chosen, 1.0)
        routed = torch.zeros_like(hit).scatter_(1, chosen, weights.double())
        self.frequency += hit.sum(0)
        self.weight += routed.sum(0)
        self.coactivation += hit.T @ hit
        self.context += routed.T @ states.double()
        for expert in hit.sum(0).nonzero().flatten().tolist():
            rows = hit[:, expert].nonzero().flatten()
            norms = output_norms(module, expert, states[rows])
            self.saliency[expert] += (routed[rows, expert] * norms).sum()
        if self.outputs is not None:
            self.outputs.add(module, states, chosen, weights)

    def profile(self, router: torch.Tensor) -> LayerProfile:
        """Return the sums with the router's rows."""
        return LayerProfile(
            router.double().clone(),
            self.frequency,
            self.weight,
            self.coactivation,
            self.context,
            self.saliency,
            **({} if self.outputs is None else self.outputs.fields()),
        )


def output_norms(module: Any, expert: int, states: torch.Tensor) -> torch.Tensor:
    """L2 norm of one expert's output: hidden states [N, H] to [N] float64.

    The expert is run through its own module with a routing weight of one, so that no layout is assumed.
    """
    return expert_output(module, expert, states).double().norm(dim=-1)


def profile(
    folder: Path,
    batches: Batches,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
    *,
    dtype: torch.dtype | None = None,
    budget: int | None = None,
    work: Path | None = None,
    note: Callable[[str], None] = lambda _text: None,
    outputs: bool = False,
) -> Profile:
    """Run a checkpoint over calibration text, one layer in memory at a time, and collect its profile.

    Args:
        folder: checkpoint folder.
        batches: `(tokens [B, T] int64, attention_mask [B, T] or None)`; padding is left out.
        progress: called with (layers done, all layers).
        dtype: type to compute in; None for the checkpoint's own.
        budget: bytes of hidden states to hold in memory, the rest waits on disk; None for no limit.
        work: folder that keeps finished layers, so that an interrupted run goes on where it was; None keeps nothing.
        note: called with a sentence if the model cannot be run layer by layer, before the whole of it is loaded.
        outputs: also collect what all experts answer to all tokens, at E / K times the computation.

    Raises:
        CheckpointError: calibration batches that cannot be used, or a model that has no experts or cannot be run.
    """
    from proxies.layerwise import Landing, Layerwise
    from proxies.watch import LayerWatch
    from proxies.weights import NotLayerwiseError

    checkpoint = Checkpoint.open(folder)
    family = family_of_config(checkpoint.config)
    check_batches(batches, positive_int(checkpoint.config, "vocab_size"))
    try:
        runner = Layerwise(checkpoint, dtype=dtype, budget=budget, scratch=work)
        layers = LayerWatch(checkpoint, family, runner, batches, work, outputs)
        landing = None if work is None else Landing(work)
        runner.run(batches, layers.visit, progress=progress, landing=landing, leave=layers.leave)
    except NotLayerwiseError as error:
        from proxies.profile_whole import profile_whole

        size = sum(t.nbytes for t in checkpoint.tensors.values()) / 1e9
        note(f"{error} The whole model is loaded instead, which takes {size:.1f} GB and more.")
        return profile_whole(folder, batches, outputs=outputs)
    return Profile(
        layers.profiles(), count_tokens(batches), calibration_digest(batches), layers.masses(), layers.influences()
    )


def count_tokens(batches: Batches) -> int:
    """Number of tokens that are not padding."""
    return sum(tokens.numel() if mask is None else int(mask.bool().sum()) for tokens, mask in batches)


def modules_by_layer(model: Any, family: Family, role: str) -> dict[int, Any]:
    """Modules of a role, by the layer that their name gives."""
    found = {}
    for name, module in model.named_modules():
        if match := re.fullmatch(family.roles[role], name):
            found[int(match["layer"])] = module
    if not found:
        raise CheckpointError(f"the {family.model_type} model has no {role} module; it has no layer with experts.")
    return found


def check_batches(batches: Batches, vocabulary: int) -> None:
    """Refuse calibration batches that a model with `vocabulary` token ids cannot be run on.

    Raises:
        CheckpointError: naming the batch and what is wrong with it, or that there is no token at all.
    """
    import torch

    count = 0
    for number, (tokens, mask) in enumerate(batches):
        if tokens.dtype != torch.int64 or tokens.ndim != 2:
            raise CheckpointError(
                f"calibration batch {number} is {tokens.dtype} {list(tokens.shape)}, but int64 [B, T] is needed."
            )
        if mask is not None and mask.shape != tokens.shape:
            raise CheckpointError(
                f"calibration batch {number} has tokens {list(tokens.shape)}, but a mask {list(mask.shape)}."
            )
        outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
        if outside.numel():
            raise CheckpointError(
                f"calibration batch {number} holds the token {int(outside[0])}, outside the vocabulary of {vocabulary}."
            )
        count += tokens.numel() if mask is None else int(mask.bool().sum())
    if not count:
        raise CheckpointError("there are no calibration tokens to profile the experts on.")


def calibration_digest(batches: Iterable[tuple[torch.Tensor, torch.Tensor | None]] | None) -> str:
    """Hexadecimal sha256 of calibration tokens and masks; `none` if there are none."""
    if batches is None:
        return "none"
    digest = hashlib.sha256()
    for tokens, mask in batches:
        digest.update(str(tuple(tokens.shape)).encode())
        digest.update(tokens.contiguous().numpy().tobytes())
        digest.update(b"all" if mask is None else mask.contiguous().numpy().tobytes())
    return digest.hexdigest()
