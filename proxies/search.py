"""What a whole-model search may ask: the divergence of a pruned model, and which exchanges might lower it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxies.checkpoint import Checkpoint
from proxies.families import Family, family_of_config
from proxies.outputs import expert_output, routing_scores
from proxies.profile import Batches, LayerProfile, LayerSums, Profile, modules_by_layer
from proxies.pruned import PrunedModel

if TYPE_CHECKING:
    import torch

Kept = Mapping[int, Sequence[int]]
_REFERENCE_NUMBERS = 2**28  # most float32 numbers of reference log-probabilities that are held: 1 GiB


def load_model(folder: Path) -> tuple[Any, Family]:
    """Load a checkpoint whole, frozen, with its own dtype; returns the model and its family."""
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", local_files_only=True, trust_remote_code=False, use_safetensors=True
    ).eval()
    return model.requires_grad_(False), family_of_config(Checkpoint.open(folder).config)


class SearchContext:
    """A profile, and the whole model to try selections on. The model is held in memory.

    Attributes:
        profile: of the original on the same calibration text.
        groups: groups of experts that keep the same number each; 1 for routers without groups.
        evaluations: divergences measured so far; one given up early counts as one.
    """

    def __init__(
        self,
        profile: Profile,
        pruned: PrunedModel,
        batches: Batches,
        *,
        groups: int = 1,
        weighted: bool = True,
        progress: Callable[[int], None] = lambda _done: None,
    ) -> None:
        """Without `weighted` all calibration tokens count alike; `progress` is told how many divergences were begun."""
        self._progress = progress
        self._weighted = weighted
        self.profile, self.groups, self.evaluations = profile, groups, 0
        self._pruned, self._batches = pruned, batches
        self._reference: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None

    @classmethod
    def load(
        cls,
        folder: Path,
        profile: Profile,
        batches: Batches,
        *,
        groups: int = 1,
        progress: Callable[[int], None] = lambda _done: None,
    ) -> SearchContext:
        """Load the checkpoint that a profile was taken of."""
        return cls(profile, PrunedModel(*load_model(folder)), batches, groups=groups, progress=progress)

    @property
    def layers(self) -> list[int]:
        """Layers that have experts."""
        return sorted(self.profile.layers)

    def kl(self, kept: Kept) -> float:
        """Kullback-Leibler divergence of the pruned model's next token from the original's, in nats.

        Mean over calibration tokens of sum_v p(v) (log p(v) - log q(v)), with p the original and q the pruned model.
        A token counts by the probability that the original gave to what follows it in the text: where the original
        does not know the text, there is no ability to keep.

        Args:
            kept: layer to kept experts; a layer that is not named stays whole.
        """
        return sum(self._divergences(kept, None) or ())

    def lowers(self, kept: Kept, parts: Sequence[float]) -> list[float] | None:
        """Whether a selection diverges less than another, given up early where it looks worse.

        It is given up after a quarter or a half of the batches if it is not better on them taken together.

        Args:
            kept: layer to kept experts.
            parts: the other's share of the divergence by batch, as `parts` or this method returned it.

        Returns:
            Its own shares by batch if their sum is lower, else None.
        """
        found = self._divergences(kept, parts)
        return found if found is not None and sum(found) < sum(parts) else None

    def parts(self, kept: Kept) -> list[float]:
        """The share of every batch in the divergence; they add up to `kl`."""
        return self._divergences(kept, None) or []

    def _divergences(self, kept: Kept, than: Sequence[float] | None) -> list[float] | None:
        import torch

        self.evaluations += 1
        self._progress(self.evaluations)
        reference, found = self._references(), []
        stops = {-(-len(reference) // 4), -(-len(reference) // 2)}
        with torch.no_grad():
            self._pruned.keep({layer: sorted(experts) for layer, experts in kept.items()})
            for (tokens, mask), (rows, wanted, weight) in zip(self._batches, reference, strict=True):
                gaps = (wanted.exp() * (wanted - self._logprobs(tokens, mask, rows))).sum(-1)
                found.append(float((weight * gaps.double()).sum()))
                if than is not None and len(found) in stops and sum(found) >= sum(than[: len(found)]):
                    return None
        return found

    def _logprobs(self, tokens: torch.Tensor, mask: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        logits = self._pruned.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        result: torch.Tensor = logits.flatten(0, 1)[rows].float().log_softmax(-1)
        return result

    def _references(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Per batch, the positions that count, the whole model's log-probabilities [N, V] there, and weights [N].

        The weights of all batches add up to one.
        """
        import torch

        if self._reference is None:
            self._pruned.keep({})
            count = sum(t.numel() for t, _ in self._batches)
            step = -(-count * self._pruned.model.config.vocab_size // _REFERENCE_NUMBERS)
            reference = []
            with torch.no_grad():
                for ids, mask in self._batches:
                    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
                    followed = torch.zeros_like(real)
                    followed[:, :-1] = real[:, :-1] & real[:, 1:]
                    rows = followed.reshape(-1).nonzero().flatten()[::step]
                    logprobs = self._logprobs(ids, mask, rows)
                    weight = logprobs.double().gather(1, ids.reshape(-1)[rows + 1, None])[:, 0].exp()
                    reference.append((rows, logprobs, weight if self._weighted else torch.ones_like(weight)))
            total = sum(float(weight.sum()) for *_, weight in reference)
            self._reference = [(rows, logprobs, weight / total) for rows, logprobs, weight in reference]
        return self._reference

    def exchange_estimates(self, kept: Kept, *, tokens: int = 2048) -> dict[int, torch.Tensor]:
        """First-order change of the divergence by every exchange of one kept for one dropped expert of a layer.

        One forward and one backward pass of the pruned model give the gradient g of the divergence by the output y of
        each layer's experts; the estimate is the sum over tokens of g (y' - y), with y' what the layer would put out
        for the same input. Group-limited choice is not modelled.

        Args:
            kept: layer to kept experts, of every layer.
            tokens: most tokens of calibration text to look at.

        Returns:
            Layer to [K, E] float64: row, the position in the sorted `kept`; column, the expert to put in its place;
            +inf where that one is kept already.
        """
        import torch

        batches, seen, count = [], 0, 0
        for (ids, mask), (rows, wanted, weight) in zip(self._batches, self._references(), strict=True):
            batches.append((ids, mask, rows, wanted, weight))
            seen, count = seen + len(rows), count + 1
            if seen >= tokens:
                break
        lists = {layer: sorted(kept[layer]) for layer in self.layers}
        passes = self._passes(lists, batches)
        self._pruned.keep({})
        experts = modules_by_layer(self._pruned.model, self._pruned.family, "experts")
        routers = modules_by_layer(self._pruned.model, self._pruned.family, "router")
        return {
            layer: _exchanges(experts[layer], routers[layer], lists[layer], *[torch.cat(p) for p in passes[layer]])
            for layer in self.layers
        }

    def _passes(self, kept: Kept, batches: list[Any]) -> dict[int, list[list[torch.Tensor]]]:
        """By layer: states [N, H], choices [N, K], weights [N, K] and gradients [N, H] of all batches."""
        import torch

        self._pruned.keep(kept)
        found: dict[int, list[list[torch.Tensor]]] = {layer: [[], [], [], []] for layer in self.layers}
        modules = modules_by_layer(self._pruned.model, self._pruned.family, "experts")
        outputs: dict[int, tuple[Any, torch.Tensor]] = {}

        def watch(layer: int) -> Callable[..., Any]:
            def hook(_module: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
                if not output.requires_grad:
                    output = output.detach().requires_grad_()
                output.retain_grad()
                outputs[layer] = args, output
                return output

            return hook

        handles = [modules[layer].register_forward_hook(watch(layer)) for layer in self.layers]
        try:
            with torch.enable_grad():
                for ids, mask, rows, wanted, weight in batches:
                    logprobs = self._logprobs(ids, mask, rows)
                    gaps = (wanted.exp() * (wanted - logprobs)).sum(-1)
                    (weight * gaps).sum().backward()
                    for layer, ((states, chosen, weights), output) in outputs.items():
                        assert output.grad is not None
                        values = (states, chosen, weights, output.grad)
                        for into, value in zip(found[layer], values, strict=True):
                            into.append(value.detach().reshape(-1, value.shape[-1])[rows])
        finally:
            for handle in handles:
                handle.remove()
        return found

    def profile_behind(self, layer: int, kept: Kept) -> LayerProfile:
        """Profile one layer in the model whose layers in `kept` are pruned already."""
        import torch

        self._pruned.keep({i: sorted(experts) for i, experts in kept.items()})
        module = modules_by_layer(self._pruned.model, self._pruned.family, "experts")[layer]
        router = modules_by_layer(self._pruned.model, self._pruned.family, "router")[layer].weight
        sums, calls = LayerSums(len(router), router.shape[1]), []
        handle = module.register_forward_pre_hook(lambda _module, args: calls.append(args))
        try:
            with torch.no_grad():
                for ids, mask in self._batches:
                    calls.clear()
                    self._pruned.model(input_ids=ids, attention_mask=mask, use_cache=False)
                    states, chosen, weights = calls[0]
                    rows = torch.ones(ids.numel()).bool() if mask is None else mask.reshape(-1).bool()
                    sums.add(module, states[rows], chosen[rows], weights[rows])
        finally:
            handle.remove()
            self._pruned.keep({})
        return sums.profile(router.detach())


def _exchanges(
    module: Any,
    router: Any,
    kept: Sequence[int],
    states: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gradient: torch.Tensor,
) -> torch.Tensor:
    """Estimates of one layer, with the whole layer's `module` and `router`; see `exchange_estimates`."""
    import torch

    index = torch.tensor(list(kept))
    _, scores, bias = routing_scores(router, states, index[chosen], weights)
    experts, top_k, mass = scores.shape[1], chosen.shape[1], weights.double().sum(1, keepdim=True)
    choice = scores + bias
    with torch.no_grad():
        value = torch.stack(
            [(expert_output(module, e, states).double() * gradient.double()).sum(1) for e in range(experts)], 1
        )
    result = torch.full((len(kept), experts), torch.inf, dtype=torch.float64)
    outside = torch.ones(experts, dtype=torch.bool)
    outside[index] = False
    now = mass[:, 0] * _weighted(choice[:, index], scores[:, index], value[:, index], top_k)
    for position in range(len(kept)):
        others = torch.cat([index[:position], index[position + 1 :]])
        best = choice[:, others].topk(min(top_k, len(others)), dim=1)
        inside = others[best.indices]  # [N, k], best first
        weight, worth = scores.gather(1, inside), value.gather(1, inside)
        total, norm = (weight * worth).sum(1, keepdim=True), weight.sum(1, keepdim=True)
        if len(others) < top_k:
            enters, lost, least = torch.ones_like(choice), torch.zeros_like(total), torch.zeros_like(norm)
        else:
            enters = (choice > best.values[:, -1:]).double()
            lost, least = (weight * worth)[:, -1:], weight[:, -1:]
        after = (total + enters * (scores * value - lost)) / (norm + enters * (scores - least)).clamp(min=1e-30)
        result[position, outside] = ((mass * after).sum(0) - now.sum())[outside]
    return result


def _weighted(choice: torch.Tensor, scores: torch.Tensor, value: torch.Tensor, top_k: int) -> torch.Tensor:
    """Mean value of the chosen experts of each token, weighted by their scores: [N]."""
    inside = choice.topk(top_k, dim=1).indices
    weight = scores.gather(1, inside)
    return (weight * value.gather(1, inside)).sum(1) / weight.sum(1).clamp(min=1e-30)
