"""The conformance check of a family: a tiny model of it, pruned on disk, is the original with the others masked out.

Anyone who adds a family can run it: ``check_family("my_model_type", folder)``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxies.checkpoint import CheckpointError
from proxies.cuts import check_request, cuts
from proxies.families import PARAM_GROUPS, ROLES, Family, family_of
from proxies.profile import modules_by_layer
from proxies.verify import check_loadable
from proxies.writer import write_checkpoint

if TYPE_CHECKING:
    import torch

KEEP = 4  # of 8


@dataclass(frozen=True)
class Conformance:
    """What was found.

    Attributes:
        layers: layers that have experts.
        difference: largest absolute difference between the logits of the pruned model and of the masked original.
        effect: largest absolute difference that masking itself makes, for comparison.
        tensors: tensors of the pruned model, each bit for bit a part of the original's.
    """

    layers: tuple[int, ...]
    difference: float
    effect: float
    tensors: int


def check_family(model_type: str, folder: Path, keep: int = KEEP) -> Conformance:
    """Save a tiny random model, keep some of its experts on disk, load it, and compare with the masked original.

    Args:
        model_type: of a known family.
        folder: an empty folder to work in.
        keep: experts to keep of eight.

    Raises:
        CheckpointError: the first thing that does not hold, in a sentence.
    """
    import torch
    from transformers import AutoModelForCausalLM

    family = family_of(model_type)
    original = save_tiny(family, folder / "original")
    checkpoint = check_loadable(folder / "original")
    check_request(checkpoint, family, keep)
    check_roles(family, original)
    check_groups(family, original)
    layers = family.moe_layers(checkpoint.config)
    kept = {layer: spread(family, checkpoint.config, keep, layer) for layer in layers}
    (folder / "proxy").mkdir()
    chosen = cuts(checkpoint, family, kept)
    write_checkpoint(folder / "proxy", chosen, family.with_experts(checkpoint.config, keep))
    check_loadable(folder / "proxy")
    proxy, info = AutoModelForCausalLM.from_pretrained(
        folder / "proxy", output_loading_info=True, local_files_only=True, trust_remote_code=False
    )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(what):
            raise CheckpointError(f"{model_type}: the pruned model loads with {what.replace('_', ' ')}: {info[what]}.")
    tokens = torch.randint(3, 60, (3, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        full = original(input_ids=tokens, use_cache=False).logits
        with masked(original, family, kept):
            expected = original(input_ids=tokens, use_cache=False).logits
        found = proxy.eval()(input_ids=tokens, use_cache=False).logits
    difference, effect = float((found - expected).abs().max()), float((full - expected).abs().max())
    if not difference <= 1e-5 * max(1.0, float(expected.abs().max())):
        raise CheckpointError(
            f"{model_type}: the pruned model's logits differ from the masked original's by {difference}."
        )
    if not effect > 0:
        raise CheckpointError(f"{model_type}: masking experts changes nothing, so the comparison proves nothing.")
    return Conformance(tuple(layers), difference, effect, len(chosen))


def save_tiny(family: Family, folder: Path) -> Any:
    """Save a tiny random model of a family with transformers; every bias that steers routing is set to something."""
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family.model_type, **family.tiny)).eval()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if "bias" in name.rpartition(".")[2]:
                    tensor.copy_(torch.rand(tensor.shape) * 0.1)
    model.save_pretrained(folder)
    return model


def spread(family: Family, config: Mapping[str, Any], keep: int, layer: int) -> list[int]:
    """Experts to keep: the same number from every group, others in every layer."""
    experts, groups = family.experts(config), family.groups(config)
    size, each = experts // groups, keep // groups
    return sorted(group * size + (layer + step) % size for group in range(groups) for step in range(each))


def check_roles(family: Family, model: Any) -> None:
    """Every role of the family that it names has a module, the expert roles one per layer.

    Raises:
        CheckpointError: naming the role.
    """
    names = [name for name, _ in model.named_modules()]
    for role in ROLES:
        if role not in family.roles:
            raise CheckpointError(f"{family.model_type}: the family does not name the role {role}.")
        if role != "rotary" and not any(re.fullmatch(family.roles[role], name) for name in names):
            raise CheckpointError(f"{family.model_type}: the model has no module of the role {role}.")
    if modules_by_layer(model, family, "router").keys() != modules_by_layer(model, family, "experts").keys():
        raise CheckpointError(f"{family.model_type}: not every layer with experts has a router, or the reverse.")


def check_groups(family: Family, model: Any) -> None:
    """Every parameter is in exactly one group.

    Raises:
        CheckpointError: naming the parameter.
    """
    if set(family.param_groups) != set(PARAM_GROUPS):
        raise CheckpointError(f"{family.model_type}: its parameter groups are not {', '.join(PARAM_GROUPS)}.")
    for name, _ in model.named_parameters():
        groups = [group for group, pattern in family.param_groups.items() if re.fullmatch(pattern, name)]
        if len(groups) != 1:
            raise CheckpointError(f"{family.model_type}: parameter {name} is in the groups {groups}, not in one.")


@contextmanager
def masked(model: Any, family: Family, kept: Mapping[int, list[int]]) -> Iterator[None]:
    """While the block runs, the routers of a model cannot choose experts that are not kept.

    The logits of the others are -inf where the router's matrix is applied, and so are their correction biases; what
    a family's router returns does not matter.
    """
    import torch

    linear, undo = torch.nn.functional.linear, []
    dropped: dict[int, list[int]] = {}
    experts = modules_by_layer(model, family, "experts")
    for layer, router in modules_by_layer(model, family, "router").items():
        block = model.get_submodule(next(n for n, m in model.named_modules() if m is experts[layer]).rpartition(".")[0])
        count = family.experts(model.config.to_dict() | {"model_type": family.model_type})
        others = [e for e in range(count) if e not in kept[layer]]
        for parameter in router.parameters():
            if parameter.ndim == 2 and parameter.shape[0] >= count:
                dropped[parameter.data_ptr()] = others
        for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
            if "correction_bias" in name:
                undo.append((tensor, tensor.detach().clone()))
                with torch.no_grad():
                    tensor[..., others] = -torch.inf

    def without(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        logits = linear(states, weight, bias)
        if weight.data_ptr() in dropped:
            logits = logits.clone()
            logits[..., dropped[weight.data_ptr()]] = -torch.inf
        return logits

    setattr(torch.nn.functional, "linear", without)  # noqa: B010 - the stub has another signature
    try:
        yield
    finally:
        setattr(torch.nn.functional, "linear", linear)  # noqa: B010 - as above
        for tensor, value in undo:
            with torch.no_grad():
                tensor.copy_(value)
