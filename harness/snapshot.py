"""A picture of everything that a fault may have patched, so that two pictures show what it left behind."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

from harness.rl.stages import Stage


class Same:
    """Compares by identity: equal only if it holds the very same object."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def snapshot(run: Any) -> dict[str, Any]:
    """Return what is in force in a run and in the process.

    Covers the stage table, the probes, the registries of implementations, the attributes of the run and its policies,
    every module's attributes, hooks and parameters (identity, type and whether they are trained, not their values), the
    functions of torch and of the modeling module, the environment, the global random states and torch's switches.

    Args:
        run: A ``harness.rl.run.Run``.
    """
    import numpy as np
    import torch
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for _, policy in run._policies("both"):  # the library hangs hooks of its own in at the first such call
        with torch.no_grad():
            policy.model(input_ids=torch.zeros(1, 2, dtype=torch.int64), output_router_logits=True)
    state: dict[str, Any] = {f"stage {s.value}": Same(run.stages[s]) for s in Stage}
    state.update({f"probe {name}": Same(probe) for name, probe in run.probes.items()})
    registries = {
        "experts": ALL_EXPERTS_FUNCTIONS,
        "attention": ALL_ATTENTION_FUNCTIONS,
        "mask": ALL_MASK_ATTENTION_FUNCTIONS,
    }
    for title, registry in registries.items():
        state[f"{title} registry"] = {name: Same(registry[name]) for name in registry}
    state.update(_attributes("run", run))
    spaces: list[Any] = [torch, torch.Tensor, torch.nn.functional, torch.linalg]
    for side, policy in run._policies("both"):
        state.update(_attributes(side, policy))
        spaces.append(sys.modules[type(policy.model).__module__])
        state[f"config of {side}"] = policy.model.config.to_json_string()
        for path, module in policy.model.named_modules():
            where = f"{side}:{path or 'whole'}"
            state[f"attributes of {where}"] = sorted(vars(module))
            state[f"class and mode of {where}"] = (type(module), module.training)
            hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
            state[f"hooks of {where}"] = [len(h) for h in (*hooks, module._backward_pre_hooks)]
            for name, p in module.named_parameters(recurse=False):
                state[f"parameter {where}.{name}"] = (Same(p), p.dtype, p.requires_grad, len(p._backward_hooks or ()))
    for space in spaces:
        state.update({f"{space.__name__}.{name}": Same(value) for name, value in vars(space).items()})
    state["environment"] = dict(os.environ)
    state["global random numbers"] = (
        torch.random.get_rng_state().numpy().tobytes(),
        random.getstate(),
        repr(np.random.get_state()),  # noqa: NPY002 - the legacy state is what a fault may have disturbed
    )
    state["torch's switches"] = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
    )
    return state


def _attributes(title: str, thing: Any) -> dict[str, Any]:
    """Return an object's attributes by identity, and what its dictionaries hold."""
    found: dict[str, Any] = {}
    for name, value in vars(thing).items():
        found[f"{title}.{name}"] = {k: Same(v) for k, v in value.items()} if type(value) is dict else Same(value)
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Name what is no longer as it was; what has come up since does not count (libraries load parts on demand)."""
    return [name for name, value in before.items() if name not in after or after[name] != value]
