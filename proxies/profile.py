"""What the experts of a checkpoint do on calibration text: the numbers that a selection is based on."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxies.checkpoint import Checkpoint, CheckpointError
from proxies.families import Family, family_of_config, positive_int

if TYPE_CHECKING:
    import torch

    from proxies.layerwise import Layerwise

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
        topk_mass: layer to the mean softmax mass of the chosen experts, in (0, 1]; empty where nothing was run.
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

        tensors = {f"{i}.{f.name}": getattr(p, f.name) for i, p in self.layers.items() for f in fields(p)}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
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

    index, weights = torch.full((len(states), 1), expert), torch.ones(len(states), 1, dtype=states.dtype)
    try:
        output = module(states, index, weights)
    except ValueError:  # LongCat's experts need two choices per token: the same expert again, with no weight
        output = module(states, index.expand(-1, 2), torch.cat([weights, 0 * weights], 1))
    return output.double().norm(dim=-1)


def profile(
    folder: Path,
    batches: Batches,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
    *,
    dtype: torch.dtype | None = None,
    budget: int | None = None,
    work: Path | None = None,
    note: Callable[[str], None] = lambda _text: None,
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

    Raises:
        CheckpointError: calibration batches that cannot be used, or a model that has no experts or cannot be run.
    """
    from proxies.layerwise import Landing, Layerwise
    from proxies.weights import NotLayerwiseError

    checkpoint = Checkpoint.open(folder)
    family = family_of_config(checkpoint.config)
    check_batches(batches, positive_int(checkpoint.config, "vocab_size"))
    try:
        runner = Layerwise(checkpoint, dtype=dtype, budget=budget, scratch=work)
        layers = _Layers(checkpoint, family, runner, batches, work)
        landing = None if work is None else Landing(work)
        runner.run(batches, layers.visit, progress=progress, landing=landing, leave=layers.leave)
    except NotLayerwiseError as error:
        from proxies.profile_whole import profile_whole

        size = sum(t.nbytes for t in checkpoint.tensors.values()) / 1e9
        note(f"{error} The whole model is loaded instead, which takes {size:.1f} GB and more.")
        return profile_whole(folder, batches)
    tokens = sum(t.numel() if m is None else int(m.sum()) for t, m in batches)
    return Profile(layers.profiles(), tokens, calibration_digest(batches), layers.masses(), layers.influences())


class _Layers:
    """Watches the experts of each layer while it is loaded."""

    def __init__(
        self, checkpoint: Checkpoint, family: Family, runner: Layerwise, batches: Batches, work: Path | None
    ) -> None:
        self._checkpoint, self._family, self._runner, self._batches, self._work = (
            checkpoint, family, runner, batches, work,
        )  # fmt: skip
        self._experts = modules_by_layer(runner.model, family, "experts")
        self._found: dict[int, LayerProfile] = {}
        self._mass: dict[int, float] = {}
        self._cosine: dict[int, float] = {}
        self._tokens = sum(t.numel() if m is None else int(m.sum()) for t, m in batches)

    def profiles(self) -> dict[int, LayerProfile]:
        """The profiles of all layers that have experts, those of an interrupted run included."""
        if self._work is not None:
            for layer in sorted(set(range(self._runner.layers)) - set(self._cosine)):
                earlier = Profile.load(self._path(layer))
                self._found.update(earlier.layers)
                self._mass.update(earlier.topk_mass)
                self._cosine.update({i: (1 - c) * self._tokens for i, c in earlier.influence.items()})
        return dict(sorted(self._found.items()))

    def leave(self, layer: int, entered: torch.Tensor, left: Any) -> None:
        """Take in how far a layer turned the hidden states [B, T, H] of one batch."""
        import torch

        out = left[0] if isinstance(left, tuple) else left
        cosine = torch.nn.functional.cosine_similarity(entered.double(), out.double(), dim=-1)
        self._cosine[layer] = self._cosine.get(layer, 0.0) + float(cosine.reshape(-1)[self._mask()].sum())

    def influences(self) -> dict[int, float]:
        """Block influence of every layer; `profiles` has to be asked first."""
        return {i: 1 - c / self._tokens for i, c in sorted(self._cosine.items())}

    def masses(self) -> dict[int, float]:
        """Mean top-k mass by layer; `profiles` has to be asked first."""
        return dict(sorted(self._mass.items()))

    @contextmanager
    def visit(self, layer: int, _module: Any) -> Iterator[None]:
        """Collect the profile of one layer while batches pass through it."""
        if layer in self._experts:
            module, router = self._experts[layer], router_rows(self._checkpoint, self._family, layer)
            sums, mass = _LayerSums(*router.shape), _Mass(router)
            handle = module.register_forward_pre_hook(collector(sums, self._mask, mass))
            try:
                yield
            finally:
                handle.remove()
            self._found[layer] = sums.profile(router)
            self._mass[layer] = mass.mean
        else:
            yield
        if self._work is not None:
            self._part({layer}).save(self._path(layer))

    def _part(self, layers: set[int]) -> Profile:
        """What is known of some layers."""
        found = {i: p for i, p in self._found.items() if i in layers}
        mass = {i: m for i, m in self._mass.items() if i in layers}
        return Profile(found, 0, "", mass, {i: x for i, x in self.influences().items() if i in layers})

    def _mask(self) -> torch.Tensor:
        import torch

        tokens, mask = self._batches[self._runner.batch]
        return (torch.ones_like(tokens) if mask is None else mask).reshape(-1).bool()

    def _path(self, layer: int) -> Path:
        assert self._work is not None
        return self._work / f"layer-{layer}.safetensors"


class _Mass:
    """Mean softmax mass of the chosen experts, as the router's rows give it."""

    def __init__(self, router: torch.Tensor) -> None:
        self._router, self._sum, self._tokens = router.float(), 0.0, 0

    def add(self, states: torch.Tensor, chosen: torch.Tensor) -> None:
        """Add tokens: hidden states [N, H], chosen experts [N, K]."""
        probabilities = (states.float() @ self._router.T).softmax(-1)
        self._sum += float(probabilities.gather(1, chosen).double().sum())
        self._tokens += len(states)

    @property
    def mean(self) -> float:
        """Mean over the tokens that were added; 1 if there were none."""
        return self._sum / self._tokens if self._tokens else 1.0


def router_rows(checkpoint: Checkpoint, family: Family, layer: int) -> torch.Tensor:
    """The router matrix [E, H] of a layer, from disk."""
    from proxies.weights import read_tensor

    name = family.router_weight.format(layer=layer)
    if name not in checkpoint.tensors:
        raise CheckpointError(f"{checkpoint.folder} lacks the router {name}.")
    return read_tensor(checkpoint, name)


def collector(sums: _LayerSums, mask: Callable[[], torch.Tensor], mass: _Mass | None = None) -> Callable[..., None]:
    """A forward pre-hook for an experts module that adds the tokens which `mask` calls real to the sums."""
    busy = False

    def collect(module: Any, args: tuple[Any, ...]) -> None:
        nonlocal busy
        if busy:  # the module is being run by `output_norms`
            return
        if len(args) != 3 or args[1].ndim != 2 or args[1].shape != args[2].shape:
            kind = type(module).__name__
            raise CheckpointError(
                f"{kind} is not called with states, chosen experts and weights, so that it cannot be profiled; use a "
                "strategy that needs no calibration."
            )
        states, chosen, weights = args
        keep = mask()
        busy = True
        try:
            sums.add(module, states[keep], chosen[keep], weights[keep])
            if mass is not None:
                mass.add(states[keep], chosen[keep])
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
