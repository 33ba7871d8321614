"""Where a model looks up its operators: registries of the library, functions of modules, the fused operators."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from harness.seams import FUSED, OperatorSlot

if TYPE_CHECKING:
    from harness.rl.policy import Policy

Undo = Callable[[], None]


class RegistrySlot:
    """One model's choice in one of transformers' registries of implementations."""

    def __init__(
        self, config: Any, attribute: str, registry: Any, fallback: Callable[..., Any], masks: Any = None
    ) -> None:
        self._config, self._attribute = config, attribute
        self._registry, self._fallback, self._masks = registry, fallback, masks

    def current(self) -> Callable[..., Any]:
        """Return the implementation in force, as ``f(module, *args)``."""
        function: Callable[..., Any] = self._registry.get_interface(
            getattr(self._config, self._attribute), self._fallback
        )
        return function

    def replace(self, function: Callable[..., Any]) -> Undo:
        """Register another implementation, select it for this model, and return what undoes both."""
        before = getattr(self._config, self._attribute)
        name = f"harness_{id(self):x}"
        self._registry[name] = function
        if self._masks is not None:
            # Under a name that is not in the table that all instances share, the model is given no mask at all.
            self._masks.register(name, self._masks[before])
        setattr(self._config, self._attribute, name)

        def undo() -> None:
            setattr(self._config, self._attribute, before)
            del self._registry[name]
            if self._masks is not None:
                del self._masks._global_mapping[name]

        return undo


class FunctionSlot:
    """A function of a Python module, replaced for as long as one model's forward pass runs.

    Other models of the process call the function as it was. A pass that is recomputed during the backward pass
    (activation checkpointing) calls it as it was, too.
    """

    def __init__(self, model: Any, owner: Any, name: str) -> None:
        self._model, self._owner, self._name = model, owner, name

    def current(self) -> Callable[..., Any]:
        """Return the function in force."""
        function: Callable[..., Any] = getattr(self._owner, self._name)
        return function

    def replace(self, function: Callable[..., Any]) -> Undo:
        """Wrap the model's forward so that it finds another function, and return what undoes it."""
        model, owner, name = self._model, self._owner, self._name
        before = vars(model).get("forward")
        forward = model.forward

        def scoped(*args: Any, **kwargs: Any) -> Any:
            clean = getattr(owner, name)
            setattr(owner, name, function)
            try:
                return forward(*args, **kwargs)
            finally:
                setattr(owner, name, clean)

        model.forward = scoped

        def undo() -> None:
            del model.forward
            if before is not None:
                model.forward = before

        return undo


class ForwardSlot:
    """The forward of one module, as ``f(module, *args)``."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def current(self) -> Callable[..., Any]:
        """Return the forward of the module's class."""
        forward: Callable[..., Any] = type(self._module).forward
        return forward

    def replace(self, function: Callable[..., Any]) -> Undo:
        """Give this one module another forward and return what undoes it."""
        module = self._module
        module.forward = lambda *args, **kwargs: function(module, *args, **kwargs)
        return lambda: delattr(module, "forward")


class TableSlot:
    """An entry in the table of fused operators that a model runs on."""

    def __init__(self, table: dict[str, Callable[..., Any]], kind: str) -> None:
        self._table, self._kind = table, kind

    def current(self) -> Callable[..., Any]:
        """Return the operator in force."""
        return self._table[self._kind]

    def replace(self, function: Callable[..., Any]) -> Undo:
        """Put another operator in force and return what undoes it."""
        clean = self._table[self._kind]
        self._table[self._kind] = function

        def undo() -> None:
            self._table[self._kind] = clean

        return undo


def operator_slots(policy: Policy, kind: str) -> list[OperatorSlot]:
    """Return where a policy's model looks up an operator.

    Args:
        policy: The policy.
        kind: One of ``harness.seams.OPERATORS``.

    Returns:
        The places; none if the model calls no such operator. A model on fused operators calls these in place of the
        softmax, rotary and grouped-matmul functions.
    """
    model = policy.model
    if kind in FUSED:
        from harness.rl.npu_ops import used_by

        return [TableSlot(policy.fused, kind)] if policy.fused is not None and kind in used_by(model) else []
    if kind == "norm":
        return [ForwardSlot(module) for _, module in policy.modules("norm")]
    if kind in ("attention", "experts"):
        return [_registry_slot(policy, kind)] if policy.modules(kind) else []
    if policy.fused is not None:
        return []
    if kind == "softmax":
        return [FunctionSlot(model, torch.nn.functional, "softmax")]
    if kind == "grouped_mm":
        chosen = model.config._experts_implementation == "grouped_mm"
        return [FunctionSlot(model, torch.nn.functional, "grouped_mm")] if chosen else []
    source = sys.modules[type(model).__module__]
    interleaved = getattr(model.config, "rope_interleave", False)
    name = "apply_rotary_pos_emb_interleave" if interleaved else "apply_rotary_pos_emb"
    return [FunctionSlot(model, source, name)] if hasattr(source, name) else []


def _registry_slot(policy: Policy, kind: str) -> RegistrySlot:
    config = policy.model.config
    if kind == "experts":
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        forward: Any = type(policy.modules("experts")[0][1]).forward
        return RegistrySlot(config, "_experts_implementation", ALL_EXPERTS_FUNCTIONS, forward.__wrapped__)
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = sys.modules[type(policy.model).__module__].eager_attention_forward
    return RegistrySlot(config, "_attn_implementation", ALL_ATTENTION_FUNCTIONS, eager, ALL_MASK_ATTENTION_FUNCTIONS)
