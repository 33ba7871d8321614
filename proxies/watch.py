"""Watches the experts of a model while calibration text passes through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxies.checkpoint import Checkpoint, CheckpointError
from proxies.families import Family
from proxies.layerwise import Layerwise
from proxies.outputs import OutputRequest, OutputSums
from proxies.profile import Batches, LayerProfile, LayerSums, Profile, count_tokens, modules_by_layer

if TYPE_CHECKING:
    import torch


class LayerWatch:
    """Watches the experts of each layer while it is loaded."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: Family,
        runner: Layerwise,
        batches: Batches,
        work: Path | None,
        outputs: bool = False,
    ) -> None:
        self._checkpoint, self._family, self._runner = checkpoint, family, runner
        self._batches, self._work = batches, work
        self._experts = modules_by_layer(runner.model, family, "experts")
        self._routers = modules_by_layer(runner.model, family, "router")
        self._request = OutputRequest(count_tokens(batches)) if outputs else None
        self._found: dict[int, LayerProfile] = {}
        self._mass: dict[int, float] = {}
        self._cosine: dict[int, float] = {}
        self._tokens = count_tokens(batches)

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
            asked = None if self._request is None else OutputSums(self._request, self._routers[layer])
            sums = LayerSums(router.shape[0], router.shape[1], asked)
            mass = _Mass(router) if self._family.scoring == "softmax" else None
            handle = module.register_forward_pre_hook(collector(sums, self._mask, mass))
            try:
                yield
            finally:
                handle.remove()
            # A router may have rows for experts that compute nothing; those are not to choose from.
            experts = self._family.experts(self._checkpoint.config)
            self._found[layer] = sums.profile(router).part(list(range(experts)))
            if mass is not None:
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


def collector(sums: LayerSums, mask: Callable[[], torch.Tensor], mass: _Mass | None = None) -> Callable[..., None]:
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
