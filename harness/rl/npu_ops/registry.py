"""The registry: every operator by name, with a derivative of its own where torch_npu registers none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from harness.rl.npu_ops import reference
from harness.seams import FUSED

Table = dict[str, Callable[..., Any]]


class _GroupedMatmul(torch.autograd.Function):
    """``y = x @ W`` by groups, with ``dx = dy @ W^T`` and ``dW = x^T @ dy`` by the same operator."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: Callable[..., list[torch.Tensor]],
        x: torch.Tensor,
        weight: torch.Tensor,
        groups: dict[str, Any],
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kernel, ctx.groups = kernel, groups
        return kernel([x], [weight], group_type=0, split_item=2, **groups)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        transposed = weight.transpose(1, 2).contiguous()
        dx = ctx.kernel([grad], [transposed], group_type=0, split_item=2, **ctx.groups)[0]
        dw = ctx.kernel([x.T.contiguous()], [grad], group_type=2, split_item=3, **ctx.groups)[0]
        return None, dx, dw, None


class _GatingTopKSoftmax(torch.autograd.Function):
    """Weights of the k largest of a softmax, with the derivative of the softmax."""

    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Any], x: torch.Tensor, finished: Any, k: int) -> Any:
        weights, experts, rows = kernel(x, finished, k)
        ctx.save_for_backward(x, experts)
        ctx.mark_non_differentiable(experts, rows)
        return weights, experts, rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        x, experts = ctx.saved_tensors
        probs = x.to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
        chosen = experts.long().clamp(max=x.shape[-1] - 1)
        spread = torch.zeros_like(probs).scatter_add_(-1, chosen, grad.to(probs.dtype))
        dx = probs * (spread - (spread * probs).sum(-1, keepdim=True))
        return None, dx.to(x.dtype), None, None


def _grouped_matmul(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def npu_grouped_matmul(
        x: list[torch.Tensor],
        weight: list[torch.Tensor],
        *,
        group_list: torch.Tensor,
        group_list_type: int = 0,
        group_type: int = 0,
        split_item: int = 2,
    ) -> list[torch.Tensor]:
        if group_type != 0 or split_item != 2:
            raise ValueError(
                f"npu_grouped_matmul with a derivative needs group_type 0 and split_item 2, got {group_type} and "
                f"{split_item}"
            )
        groups = {"group_list": group_list, "group_list_type": group_list_type}
        return [_GroupedMatmul.apply(kernel, x[0], weight[0], groups)]

    return npu_grouped_matmul


def _gating_top_k_softmax(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def npu_moe_gating_top_k_softmax(x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1) -> Any:
        return _GatingTopKSoftmax.apply(kernel, x, finished, k)

    return npu_moe_gating_top_k_softmax


DERIVATIVES = {
    "npu_grouped_matmul": _grouped_matmul,
    "npu_moe_gating_top_k_softmax": _gating_top_k_softmax,
}


def table(ops: Literal["reference", "fused"]) -> Table:
    """Return every operator by its name in torch_npu; the caller owns the table.

    Args:
        ops: ``reference`` in plain torch, or ``fused`` by torch_npu: unverified on hardware.

    Raises:
        MachineError: If ``fused`` is asked for without an NPU.
    """
    if ops == "reference":
        source: Any = reference
    else:
        from harness.rl.device import torch_npu

        source = torch_npu()
    kernels: Table = {name: getattr(source, name) for name in FUSED}
    return {name: DERIVATIVES.get(name, lambda kernel: kernel)(kernel) for name, kernel in kernels.items()}
