"""What a stage may see of its run: the context of one step, and the keyed source of randomness."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness.rl.stages import Ops, Update

if TYPE_CHECKING:
    import torch

    from harness.rl.policy import Policy
    from harness.spec import RLSpec, TaskSpec


def keyed_seed(seed: int, stream: str, step: int) -> int:
    """Return a 63-bit seed that is a function of (seed, stream, step) alone."""
    digest = hashlib.sha256(f"{seed}/{stream}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True)
class Context:
    """One step of one run.

    Attributes:
        step: Number of the step, from 0.
        seed: Seed of the run.
        rl: RL settings.
        task: Prompts.
        tokenizer: Tokenizer of the checkpoint.
        trainer: Weights that are trained.
        rollout: Weights that sample; joined to the trainer's by the ``sync`` stage.
        reference: Frozen weights of the KL term, or None.
        ops: The small functions that the stages are made of.
        salt: Changes every random stream where it is not empty.
    """

    step: int
    seed: int
    rl: RLSpec
    task: TaskSpec
    tokenizer: Any
    trainer: Policy
    rollout: Policy
    reference: Policy | None
    ops: Ops
    salt: str = ""

    def rng(self, name: str) -> torch.Generator:
        """Return a generator that depends on (seed, name, step) only, on the CPU."""
        import torch

        return torch.Generator().manual_seed(keyed_seed(self.seed, name + self.salt, self.step))

    def replacing(self, **ops: Callable[..., Any]) -> Context:
        """Return a copy in which some of the small functions are others."""
        return replace(self, ops=replace(self.ops, **ops))

    def salted(self, salt: str) -> Context:
        """Return a copy whose random streams are others."""
        return replace(self, salt=salt)

    def skipped_step(self) -> Update:
        """Drop the gradients without an optimiser step, and say so."""
        for parameter in self.trainer.model.parameters():
            parameter.grad = None
        return Update(skipped=True, lr=self.rl.lr)
