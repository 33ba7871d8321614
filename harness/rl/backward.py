"""A forward call whose values are its own and whose gradients somebody else may rewrite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from harness.seams import Gradients


class RecordedCall:
    """One forward call with its own piece of the autograd graph.

    Attributes:
        module: The module that was called, or None for a plain function.
        args: Positional arguments, without the module.
        kwargs: Keyword arguments.
        inputs: The floating-point tensors among the arguments, in order.
        weights: Trainable parameters of the module by name; once it has run, those that it used.
    """

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module = args[0] if args and isinstance(args[0], nn.Module) else None
        self.args, self.kwargs = (args if self.module is None else args[1:]), kwargs
        self._forward = forward
        self._flat, self._spec = pytree.tree_flatten((self.args, kwargs))
        self.inputs = [x for x in self._flat if _is_float(x)]
        named = [] if self.module is None else self.module.named_parameters()
        self.weights = {name: p for name, p in named if p.requires_grad}
        self._leaves: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []

    def run(self) -> Any:
        """Call the forward on copies of the inputs that are leaves of a graph of their own."""
        leaves = iter([x.detach().requires_grad_(x.requires_grad) for x in self.inputs])
        flat = [next(leaves) if _is_float(x) else x for x in self._flat]
        self._leaves = [x for x in flat if _is_float(x)]
        args, kwargs = pytree.tree_unflatten(flat, self._spec)
        head = () if self.module is None else (self.module,)
        with torch.enable_grad():
            result = self._forward(*head, *args, **kwargs)
        self._outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
        used = _variables(self._outputs)  # an engine's hooks must not run for the others
        self.weights = {name: p for name, p in self.weights.items() if id(p) in used}
        return result

    def backward(self, *grads: torch.Tensor) -> Gradients:
        """Return the correct gradients, given those of the differentiable outputs."""
        wanted = [x for x in (*self._leaves, *self.weights.values()) if x.requires_grad]
        found = torch.autograd.grad(self._outputs, wanted, grads, allow_unused=True, retain_graph=True)
        by_tensor = {id(x): g for x, g in zip(wanted, found, strict=True)}
        inputs = tuple(by_tensor.get(id(x)) for x in self._leaves)
        return Gradients(inputs, {name: by_tensor.get(id(p)) for name, p in self.weights.items()})


class _Rewritten(torch.autograd.Function):
    """Identity on a call's results in the forward direction; the rewritten gradient in the backward direction."""

    @staticmethod
    def forward(ctx: Any, call: RecordedCall, rewrite: Any, results: list[torch.Tensor], *_: torch.Tensor) -> Any:
        plain = [x.detach() for x in results]
        ctx.call, ctx.rewrite = call, rewrite
        ctx.differentiable = [x.requires_grad for x in results]
        ctx.mark_non_differentiable(*[y for x, y in zip(results, plain, strict=True) if not x.requires_grad])
        return tuple(plain)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        given = [g for g, keep in zip(grads, ctx.differentiable, strict=True) if keep]
        found = ctx.rewrite(ctx.call, *given)
        return (None, None, None, *found.inputs, *(found.weights.get(name) for name in ctx.call.weights))


def with_backward(forward: Callable[..., Any], rewrite: Callable[..., Gradients]) -> Callable[..., Any]:
    """Return a callable with the values of ``forward`` and the gradients of ``rewrite``.

    Args:
        forward: Any differentiable function or module forward; weights are those of a module passed first.
        rewrite: ``(call, *grads) -> Gradients``; ``call.backward(*grads)`` gives the correct ones.

    Returns:
        The callable; without gradients it is ``forward`` itself. ``rewrite`` runs once per backward pass of a call.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = RecordedCall(forward, args, kwargs)
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in (*call.inputs, *call.weights.values())):
            return forward(*args, **kwargs)
        flat, tree = pytree.tree_flatten(call.run())
        results = [x for x in flat if isinstance(x, torch.Tensor)]
        tensors = iter(_Rewritten.apply(call, rewrite, results, *call.inputs, *call.weights.values()))
        return pytree.tree_unflatten([next(tensors) if isinstance(x, torch.Tensor) else x for x in flat], tree)

    return wrapped


def _is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _variables(outputs: list[torch.Tensor]) -> set[int]:
    """Identities of the leaves that tensors were computed from."""
    found, seen, waiting = set(), set(), [x.grad_fn for x in outputs]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    return found
