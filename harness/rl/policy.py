"""A policy: a checkpoint folder loaded for one side of the run, its log-probabilities, and its modules by role."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.errors import UsageError
from harness.rl.stages import Batch, Ops
from harness.spec import SideSpec
from proxies.families import family_of


@dataclass(frozen=True)
class Scores:
    """Result of teacher forcing.

    Attributes:
        logprobs: ``[B, R]`` float32, of the response tokens under the tempered distribution.
        entropy: ``[B, R]`` float32 in nats, detached.
        aux_loss: Scalar load-balancing loss, or None if it was not asked for.
        routing: Router statistics, empty if they were not asked for.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    aux_loss: torch.Tensor | None
    routing: Mapping[str, float]


class Policy:
    """One copy of the model's weights.

    Attributes:
        model: The causal language model.
        family: Where its experts, routers and other roles live.
        forward: What teacher forcing calls: the model, or the engine that has wrapped it.
        fused: Table of the fused operators that the model runs on; None where it runs on the library's.
        whole: ``with policy.whole():`` every parameter is complete in memory; ``whole(write=True)`` also keeps what
            the block changes in place. An engine that partitions weights or holds master copies puts its own here.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.forward: Callable[..., Any] = model
        self.whole: Callable[..., AbstractContextManager[Any]] = _already_whole
        self.family = family_of(model.config.model_type)
        self.fused: dict[str, Callable[..., Any]] | None = None

    @classmethod
    def load(cls, folder: Path, side: SideSpec) -> Policy:
        """Load a checkpoint folder onto the CPU.

        Args:
            folder: Hugging Face checkpoint folder with safetensors weights.
            side: Precision and implementations.

        Raises:
            UsageError: If the folder's model is of an unknown architecture, or one without fused operators that were
                asked for.
            MachineError: If the operators of an NPU were asked for where there is none.
        """
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=getattr(torch, side.dtype),
                attn_implementation=side.attention,
                experts_implementation=side.experts,
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
            )
        except (OSError, KeyError, ValueError) as e:
            raise UsageError(f"{folder} cannot be loaded with {side.attention} / {side.experts}: {e}") from e
        model.eval()  # no dropout on either side; training mode would only switch it on
        return cls(model)._on(side)

    def copy(self, side: SideSpec) -> Policy:
        """Return separate weights in another precision or implementation."""
        model = copy.deepcopy(self.model).to(getattr(torch, side.dtype))
        model.set_attn_implementation(side.attention)
        model.set_experts_implementation(side.experts)
        return Policy(model)._on(side)

    def _on(self, side: SideSpec) -> Policy:
        """Run on the operators that a side asks for and return self."""
        from harness.rl import npu_ops

        npu_ops.remove(self.model)  # a copy of a model on fused operators still shares their table
        if side.ops != "library":
            self.fused = npu_ops.table(side.ops)
            npu_ops.install(self.model, self.fused)
        return self

    def freeze(self) -> Policy:
        """Turn off gradients for good and return self."""
        self.model.requires_grad_(False)
        return self

    def modules(self, role: str) -> list[tuple[str, nn.Module]]:
        """Return ``(name, module)`` of every module of a role."""
        pattern = self.family.roles.get(role)
        if pattern is None:
            return []
        return [(n, m) for n, m in self.model.named_modules() if re.fullmatch(pattern, n)]

    def parameter_groups(self) -> dict[str, list[str]]:
        """Return the names of the parameters of each gradient-norm group."""
        groups: dict[str, list[str]] = {}
        for name, _ in self.model.named_parameters():
            for group, pattern in self.family.param_groups.items():
                if re.fullmatch(pattern, name):
                    groups.setdefault(group, []).append(name)
                    break
        return groups

    def score(self, batch: Batch, ops: Ops, temperature: float, *, aux: bool = False, routing: bool = False) -> Scores:
        """Score the response tokens of a batch by teacher forcing; gradients follow torch's grad mode.

        Args:
            batch: Sequences.
            ops: Gives ``logprob`` and ``entropy``.
            temperature: Of the distribution that is scored.
            aux: Also compute the router's load-balancing loss.
            routing: Also compute router statistics.
        """
        responses = batch.response_mask.shape[1]
        out = self.forward(
            input_ids=batch.tokens,
            attention_mask=batch.attention_mask,
            position_ids=positions(batch.attention_mask),
            use_cache=False,
            logits_to_keep=responses + 1,
            output_router_logits=aux or routing,
        )
        logits = out.logits[:, :-1].float()
        logprobs = ops.logprob(logits, batch.tokens[:, -responses:], temperature)
        with torch.no_grad():
            entropy = ops.entropy(logits, temperature)
        statistics = routing_statistics(out.router_logits, batch.attention_mask, self.top_k) if routing else {}
        return Scores(logprobs, entropy, out.aux_loss if aux else None, statistics)

    @property
    def top_k(self) -> int:
        """Experts chosen per token."""
        return int(self.model.config.num_experts_per_tok)

    @torch.no_grad()
    def load_from(self, other: Policy) -> None:
        """Take over another policy's weights, rounded to this one's precision."""
        with other.whole():
            torch._foreach_copy_(list(self.model.parameters()), list(other.model.parameters()))


def _already_whole(*, write: bool = False) -> AbstractContextManager[None]:
    return nullcontext()


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Position of every token of left-padded sequences: ``[B, T]`` int64, 0 on padding."""
    return (attention_mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def routing_statistics(
    router_logits: tuple[torch.Tensor, ...], attention_mask: torch.Tensor, top_k: int
) -> dict[str, float]:
    """Summarise where the routers send tokens, averaged over layers; padding is left out.

    Args:
        router_logits: Per layer ``[B * T, E]``.
        attention_mask: ``[B, T]``.
        top_k: Experts chosen per token.

    Returns:
        ``router_entropy`` (nats, mean over tokens), ``topk_mass`` (softmax mass of the chosen experts, mean over
        tokens), ``expert_imbalance`` (largest expert load over mean load).
    """
    keep = attention_mask.reshape(-1).bool()
    probs = torch.stack([r[keep] for r in router_logits]).float().softmax(-1)  # [L, N, E]
    entropy = torch.special.entr(probs).sum(-1).mean()
    mass, chosen = probs.topk(top_k, dim=-1)
    load = torch.zeros(probs.shape[0], probs.shape[2]).scatter_add_(
        1, chosen.flatten(1), torch.ones(chosen.flatten(1).shape)
    )
    imbalance = (load.amax(1) / load.mean(1)).mean()
    return {
        "router_entropy": float(entropy),
        "topk_mass": float(mass.sum(-1).mean()),
        "expert_imbalance": float(imbalance),
    }
