"""Originals that are trained on demand: a recipe in, a Hugging Face checkpoint folder out, cached."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.resources
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import Field

from harness.errors import UsageError, unknown
from harness.rl import tasks
from harness.spec import Frozen, TaskSpec, validate

if TYPE_CHECKING:
    import torch

Progress = Callable[[int, int, float], None]


class OriginalRecipe(Frozen):
    """How an original is made: an architecture, and next-token training on the answers of character tasks.

    Attributes:
        name: Name of the recipe.
        model_type: Architecture, as in config.json.
        architecture: Keys of the model's configuration; vocabulary and special tokens come from the tokenizer, the
            coefficient of the router's loss from ``aux_coef``.
        task: What it learns.
        seed: Seed of weights and data.
        steps: Optimiser steps.
        batch_size: Sequences per step.
        lr: Peak learning rate of AdamW, with linear warm-up and cosine decay to 5%.
        warmup_steps: Steps of the warm-up.
        aux_coef: Coefficient of ``balance``; 0 trains without it.
        bias_rate: Change per step of the router's correction bias, up for experts with less than an even share of the
            step's choices and down for those with more (https://arxiv.org/abs/2408.15664); 0 leaves it at zero.
    """

    name: str
    model_type: str
    architecture: dict[str, Any]
    task: TaskSpec = TaskSpec()
    seed: int = 0
    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    lr: float = Field(gt=0)
    warmup_steps: int = Field(ge=1)
    aux_coef: float = Field(ge=0)
    bias_rate: float = Field(default=0.0, ge=0)


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    folder = importlib.resources.files("experiments") / "originals"
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))


def load_recipe(name_or_file: str) -> OriginalRecipe:
    """Load a recipe by name, or from a YAML file.

    Raises:
        UsageError: If there is no such recipe, or the file is not a valid one.
    """
    if name_or_file.endswith((".yaml", ".yml")) or "/" in name_or_file:
        if not Path(name_or_file).is_file():
            raise UsageError(f"original file {name_or_file} does not exist")
        text, where = Path(name_or_file).read_text(encoding="utf-8"), name_or_file
    elif name_or_file in recipe_names():
        source = importlib.resources.files("experiments") / "originals" / f"{name_or_file}.yaml"
        text, where = source.read_text(encoding="utf-8"), f"original {name_or_file}"
    else:
        raise unknown("original", name_or_file, recipe_names())
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise UsageError(f"{where} is not valid YAML: {' '.join(str(e).split())}") from None
    recipe: OriginalRecipe = validate(OriginalRecipe, data, where)
    return recipe


def ensure_original(
    recipe: str | OriginalRecipe, home: Path, progress: Progress = lambda _step, _total, _loss: None
) -> Path:
    """Return the checkpoint folder of an original, trained now if it is not cached.

    Two processes that train the same original at once make the same bytes; the first to finish wins. Beside the
    checkpoint lies ``original.json``: the recipe, and what came of it (see ``report``).

    Args:
        recipe: A recipe, the name of one, or a YAML file that holds one.
        home: The cache's root.
        progress: Called with (step, all steps, loss).
    """
    if isinstance(recipe, str):
        recipe = load_recipe(recipe)
    folder = home / "originals" / f"{recipe.name}-{_identity(recipe)}"
    if (folder / "config.json").exists():
        return folder
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        started = time.monotonic()
        model, tokenizer = train(recipe, progress)
        seconds = time.monotonic() - started
        temporary.mkdir(parents=True)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        facts = report(recipe, model, tokenizer, seconds)
        (temporary / "original.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _publish(temporary: Path, folder: Path) -> None:
    """Rename into place; another process that was faster has made the same."""
    try:
        temporary.rename(folder)
    except OSError:
        if not (folder / "config.json").exists():
            raise


def _identity(recipe: OriginalRecipe) -> str:
    sources = [Path(__file__).read_bytes(), Path(tasks.__file__).read_bytes()]
    text = json.dumps([recipe.model_dump(), _versions(), [hashlib.sha256(s).hexdigest() for s in sources]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _versions() -> list[str]:
    return [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "numpy")]


def report(recipe: OriginalRecipe, model: Any, tokenizer: Any, seconds: float) -> dict[str, Any]:
    """Return what ``original.json`` says: the recipe, its cost, and how able and how balanced the model is.

    ``ability`` maps temperature (0 is greedy) to a score on the evaluation stream; ``expert_share`` gives, per layer,
    the share of the least and of the most chosen expert, in units of an even share.
    """
    from harness.rl import ability
    from harness.rl.policy import Policy

    policy = Policy(model)
    shares = ability.expert_shares(policy, tokenizer, recipe.task)
    return {
        "schema": "harness/original@1",
        "recipe": recipe.model_dump(),
        "seconds": round(seconds, 1),
        "versions": _versions(),
        "ability": {str(t): asdict(ability.score(policy, tokenizer, recipe.task, t)) for t in (1.0, 0.8, 0.0)},
        "expert_share": {"least": shares.amin(1).tolist(), "most": shares.amax(1).tolist()},
    }


def train(recipe: OriginalRecipe, progress: Progress) -> tuple[Any, Any]:
    """Train an original on one thread; bit-identical on one kind of CPU.

    Returns:
        Model and tokenizer.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            return _train(recipe, progress)
    finally:
        torch.set_num_threads(threads)


def _train(recipe: OriginalRecipe, progress: Progress) -> tuple[Any, Any]:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.utils.logging.disable_progress_bar()
    tokenizer = tasks.make_tokenizer()
    config = _config(recipe, tokenizer)
    torch.manual_seed(recipe.seed)
    model = AutoModelForCausalLM.from_config(config)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    routers = _biased_routers(model, recipe)
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * _schedule(step, recipe)
        batch = tasks.draw(recipe.task, recipe.seed, "training", step, recipe.batch_size)
        tokens, attention, mask = tasks.encode(batch, tokenizer)
        out = model(
            input_ids=tokens, attention_mask=attention, output_router_logits=recipe.aux_coef > 0, use_cache=False
        )
        for router, chosen in routers:
            _nudge_bias(router.e_score_correction_bias, chosen.pop()[attention.reshape(-1).bool()], recipe.bias_rate)
        logprobs = out.logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        loss = -(logprobs * mask[:, 1:]).sum() / mask.sum()
        aux = balance(out.router_logits, attention, config.num_experts_per_tok) if recipe.aux_coef else 0.0
        (loss + recipe.aux_coef * aux).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress(step + 1, recipe.steps, float(loss.detach()))
    return model.eval(), tokenizer


def _biased_routers(model: Any, recipe: OriginalRecipe) -> list[tuple[Any, list[torch.Tensor]]]:
    """Routers with a correction bias, each with a list that receives the choices [N, K] of every forward pass."""
    found: list[tuple[Any, list[torch.Tensor]]] = []
    if recipe.bias_rate:
        for module in model.modules():
            if "e_score_correction_bias" in dict(module.named_buffers(recurse=False)):
                chosen: list[torch.Tensor] = []
                module.register_forward_hook(lambda _m, _args, out, chosen=chosen: chosen.append(out[2].detach()))
                found.append((module, chosen))
        if not found:
            raise UsageError(
                f"original {recipe.name}: bias_rate is set, but {recipe.model_type} has no bias to correct"
            )
    return found


def _nudge_bias(bias: torch.Tensor, chosen: torch.Tensor, rate: float) -> None:
    """Move a correction bias [E] towards an even load, in place; ``chosen`` are expert indices."""
    import torch

    load = torch.bincount(chosen.reshape(-1), minlength=len(bias)).float()
    bias += rate * (load.mean() - load).sign()


def _config(recipe: OriginalRecipe, tokenizer: Any) -> Any:
    """Build the model's configuration; transformers itself would take a misspelt key without a word."""
    from transformers import AutoConfig

    own = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "router_aux_loss_coef": recipe.aux_coef,
    }
    try:
        known = AutoConfig.for_model(recipe.model_type)
        for key in recipe.architecture:
            if key in own:
                raise UsageError(f"original {recipe.name}: architecture.{key} is not the recipe's to set")
            if not hasattr(known, key) and key != "head_dim":  # read by the attention, declared by few
                raise unknown(f"key of original {recipe.name}", f"architecture.{key}", _keys(known))
        return AutoConfig.for_model(recipe.model_type, **own, **recipe.architecture)
    except UsageError:
        raise
    except ValueError as e:
        raise UsageError(f"original {recipe.name}: {e}") from e


def _keys(config: Any) -> list[str]:
    return [f"architecture.{key}" for key in (*config.to_dict(), *config.attribute_map)]


def balance(router_logits: tuple[torch.Tensor, ...], attention_mask: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the load-balancing loss of each layer, averaged over layers; ``top_k`` if all are evenly used.

    Per layer ``E * sum_e f_e P_e``, with ``f_e`` the choices of expert e per token and ``P_e`` its mean probability
    (equations 4 to 6 of https://arxiv.org/abs/2101.03961, for ``top_k`` choices). The loss that comes with the model
    sums over layers before it multiplies, so an expert that one layer never chooses is made up for by another.

    Args:
        router_logits: ``[B * T, E]`` per layer.
        attention_mask: ``[B, T]``; padding does not count.
        top_k: Experts per token.
    """
    import torch

    weight = attention_mask.reshape(-1, 1).float() / attention_mask.sum()
    losses = []
    for logits in router_logits:
        probabilities = logits.float().softmax(-1)
        chosen = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k, -1).indices, 1.0)
        losses.append(probabilities.shape[-1] * ((weight * chosen).sum(0) * (weight * probabilities).sum(0)).sum())
    return torch.stack(losses).mean()


def _schedule(step: int, recipe: OriginalRecipe) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    return min((step + 1) / recipe.warmup_steps, 1.0) * (0.05 + 0.95 * cosine)
