"""What the experts of a checkpoint do on calibration text: the numbers that a selection is based on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxies.checkpoint import Checkpoint, CheckpointError
from proxies.families import Family, family_of_config, positive_int

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
    """

    router: torch.Tensor
    frequency: torch.Tensor
    weight: torch.Tensor
    coactivation: torch.Tensor
    context: torch.Tensor
    saliency: torch.Tensor

    @property
    def experts(self) -> int:
        """Number of experts."""
        return int(self.router.shape[0])


@dataclass(frozen=True)
class Profile:
    """The profile of a checkpoint: layer index to profile, and what it was measured on.

    Attributes:
        layers: one profile per layer that has experts.
        tokens: number of calibration tokens.
        calibration: sha256 of the calibration tokens.
    """

    layers: dict[int, LayerProfile]
    tokens: int
    calibration: str

    def save(self, path: Path) -> None:
        """Write as safetensors, so that proxies of several sizes can be selected from one profile."""
        from safetensors.torch import save_file

        tensors = {f"{i}.{f.name}": getattr(p, f.name) for i, p in self.layers.items() for f in fields(p)}
        save_file(tensors, path, metadata={"tokens": str(self.tokens), "calibration": self.calibration})

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
        return cls(profiles, int(metadata["tokens"]), metadata["calibration"])


class _LayerSums:
    """Accumulates one layer's profile from what passes its router and its experts."""

    def __init__(self, experts: int, hidden: int) -> None:
        import torch

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

    def profile(self, router: torch.Tensor) -> LayerProfile:
        """Return the sums with the router's rows."""
        return LayerProfile(
            router.double().clone(), self.frequency, self.weight, self.coactivation, self.context, self.saliency
        )


def output_norms(module: Any, expert: int, states: torch.Tensor) -> torch.Tensor:
    """L2 norm of one expert's output: hidden states [N, H] to [N] float64.

    The expert is run through its own module with a routing weight of one, so that no layout is assumed.
    """
    import torch

    index = torch.full((len(states), 1), expert)
    output = module(states, index, torch.ones(len(states), 1, dtype=states.dtype))
    return output.double().norm(dim=-1)


def profile(folder: Path, batches: Batches, progress: Callable[[int, int], None] = lambda _done, _all: None) -> Profile:
    """Run a checkpoint over calibration text and collect its profile. The whole model is held in memory.

    Args:
        folder: checkpoint folder.
        batches: `(tokens [B, T] int64, attention_mask [B, T] or None)`; padding is left out.
        progress: called with (batches done, all batches).

    Raises:
        CheckpointError: calibration batches that cannot be used, or a model without experts.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.utils.logging.disable_progress_bar()
    config = Checkpoint.open(folder).config
    family = family_of_config(config)
    check_batches(batches, positive_int(config, "vocab_size"))
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", local_files_only=True, trust_remote_code=False, use_safetensors=True
    ).eval()
    routers, experts = modules_by_layer(model, family, "router"), modules_by_layer(model, family, "experts")
    sums = {i: _LayerSums(len(routers[i].weight), routers[i].weight.shape[1]) for i in experts}
    mask: list[torch.Tensor] = []
    handles = [module.register_forward_pre_hook(_collector(sums[i], mask)) for i, module in experts.items()]
    try:
        with torch.no_grad():
            for done, (tokens, attention) in enumerate(batches):
                attention = torch.ones_like(tokens) if attention is None else attention
                mask[:] = [attention.reshape(-1).bool()]
                model(input_ids=tokens, attention_mask=attention, use_cache=False)
                progress(done + 1, len(batches))
    finally:
        for handle in handles:
            handle.remove()
    return Profile(
        {i: sums[i].profile(routers[i].weight.detach()) for i in sorted(sums)},
        int(sum(int((torch.ones_like(t) if m is None else m).sum()) for t, m in batches)),
        calibration_digest(batches),
    )


def _collector(sums: _LayerSums, mask: list[torch.Tensor]) -> Callable[..., None]:
    busy = False

    def collect(module: Any, args: tuple[Any, ...]) -> None:
        nonlocal busy
        if busy:  # the module is being run by `output_norms`
            return
        states, chosen, weights = args
        keep = mask[0]
        busy = True
        try:
            sums.add(module, states[keep], chosen[keep], weights[keep])
        finally:
            busy = False

    return collect


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


def calibration_digest(batches: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> str:
    """Hexadecimal sha256 of calibration tokens and masks."""
    digest = hashlib.sha256()
    for tokens, mask in batches:
        digest.update(str(tuple(tokens.shape)).encode())
        digest.update(tokens.contiguous().numpy().tobytes())
        digest.update(b"all" if mask is None else mask.contiguous().numpy().tobytes())
    return digest.hexdigest()
