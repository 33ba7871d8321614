"""The plain torch engine: AdamW on one process, every stage open to faults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from harness.rl.stages import Batch, Grads, Loss, Stage, StageFn, Update

if TYPE_CHECKING:
    from harness.rl.context import Context
    from harness.rl.policy import Policy
    from harness.spec import RLSpec


def global_norm(grads: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """L2 norm over all gradients, accumulated in fp32."""
    norms = torch._foreach_norm(list(grads.values()), 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms))


class TorchEngine:
    """Optimiser and the stages around it.

    Attributes:
        owned: Stages that this engine does not leave open to faults, with the engine's name: none.
    """

    owned: Mapping[Stage, str] = {}

    def __init__(self, trainer: Policy, rl: RLSpec) -> None:
        self._named = dict(trainer.model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            self._named.values(),
            lr=rl.lr,
            betas=rl.betas,
            eps=rl.eps,
            weight_decay=rl.weight_decay,
            fused=True,
        )

    def stages(self) -> dict[Stage, StageFn]:
        """Return the stages that this engine implements."""
        return {
            Stage.SCALE: self.scale,
            Stage.BACKWARD: self.backward,
            Stage.REDUCE: self.reduce,
            Stage.UNSCALE: self.unscale,
            Stage.CLIP: self.clip,
            Stage.STEP: self.step,
        }

    def effective(self) -> dict[str, Any]:
        """Return the settings that are in force, read back from the optimiser."""
        group = self._optimizer.param_groups[0]
        return {k: group[k] for k in ("lr", "betas", "eps", "weight_decay")}

    def scale(self, ctx: Context, loss: Loss) -> torch.Tensor:
        """Multiply the loss by the static loss scale."""
        return loss.value * ctx.rl.loss_scale

    def backward(self, ctx: Context, scaled: torch.Tensor) -> None:
        """Accumulate gradients."""
        scaled.backward()

    def reduce(self, ctx: Context, mini: Batch) -> Grads:
        """Collect the gradients of the mini-batch; with one process there is nothing to average."""
        return Grads({n: p.grad for n, p in self._named.items() if p.grad is not None})

    def unscale(self, ctx: Context, grads: Grads) -> Grads:
        """Divide the gradients by the loss scale."""
        if ctx.rl.loss_scale != 1.0:
            torch._foreach_div_(list(grads.named.values()), ctx.rl.loss_scale)
        return grads

    def clip(self, ctx: Context, grads: Grads) -> Grads:
        """Measure the global norm and scale the gradients down to the limit."""
        norm = global_norm(grads.named)
        if ctx.rl.max_grad_norm > 0:
            factor = (ctx.rl.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(list(grads.named.values()), factor)
        return grads.with_(norm=float(norm))

    def step(self, ctx: Context, grads: Grads) -> Update:
        """Change the weights, unless the norm is not finite and such steps are to be skipped."""
        norm = grads.norm if grads.norm is not None else 0.0
        if ctx.rl.skip_nonfinite and not abs(norm) < float("inf"):
            return ctx.skipped_step()
        for name, grad in grads.named.items():
            self._named[name].grad = grad
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return Update(skipped=False, lr=ctx.rl.lr)
