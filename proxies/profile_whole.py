"""The profile of a model that is in memory as a whole: for models that cannot be run layer by layer, and as a check."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from proxies.checkpoint import Checkpoint
from proxies.families import family_of_config
from proxies.outputs import OutputRequest, OutputSums
from proxies.profile import Batches, LayerSums, Profile, calibration_digest, count_tokens, modules_by_layer
from proxies.watch import collector, router_rows

if TYPE_CHECKING:
    import torch


def profile_whole(folder: Path, batches: Batches, *, outputs: bool = False) -> Profile:
    """The same profile as `proxies.profile.profile` gives, without top-k mass and block influence."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.utils.logging.disable_progress_bar()
    checkpoint = Checkpoint.open(folder)
    family = family_of_config(checkpoint.config)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", local_files_only=True, trust_remote_code=False, use_safetensors=True
    ).eval()
    experts = modules_by_layer(model, family, "experts")
    routers = {i: router_rows(checkpoint, family, i) for i in experts}
    modules, request = modules_by_layer(model, family, "router"), OutputRequest(count_tokens(batches))
    sums = {
        i: LayerSums(len(routers[i]), routers[i].shape[1], OutputSums(request, modules[i]) if outputs else None)
        for i in experts
    }
    keep: list[torch.Tensor] = []
    for i, module in experts.items():
        module.register_forward_pre_hook(collector(sums[i], lambda: keep[-1]))
    with torch.no_grad():
        for tokens, mask in batches:
            keep[:] = [(torch.ones_like(tokens) if mask is None else mask).reshape(-1).bool()]
            model(input_ids=tokens, attention_mask=mask, use_cache=False)
    every = list(range(family.experts(checkpoint.config)))
    layers = {i: sums[i].profile(routers[i]).part(every) for i in sorted(sums)}
    return Profile(layers, count_tokens(batches), calibration_digest(batches))
