"""Originals that are trained on demand: a recipe in, a Hugging Face checkpoint folder out, cached."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.resources
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from harness.errors import UsageError, unknown
from harness.rl import tasks
from harness.spec import Frozen, TaskSpec, validate

Progress = Callable[[int, int, float], None]


class OriginalRecipe(Frozen):
    """How an original is made: an architecture, and next-token training on the answers of character tasks.

    Attributes:
        name: Name of the recipe.
        model_type: Architecture, as in config.json.
        architecture: Keys of the model's configuration; vocabulary and special tokens come from the tokenizer.
        task: What it learns.
        seed: Seed of weights and data.
        steps: Optimiser steps.
        batch_size: Sequences per step.
        lr: Peak learning rate of AdamW, with linear warm-up and cosine decay to 5%.
        warmup_steps: Steps of the warm-up.
        aux_coef: Coefficient of the router's load-balancing loss.
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


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    folder = importlib.resources.files("experiments") / "originals"
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))


def load_recipe(name: str) -> OriginalRecipe:
    """Load a recipe by name.

    Raises:
        UsageError: If there is none of that name.
    """
    if name not in recipe_names():
        raise unknown("original", name, recipe_names())
    source = importlib.resources.files("experiments") / "originals" / f"{name}.yaml"
    data = yaml.safe_load(source.read_text(encoding="utf-8"))
    recipe: OriginalRecipe = validate(OriginalRecipe, data, f"original {name}")
    return recipe


def ensure_original(
    recipe: str | OriginalRecipe, home: Path, progress: Progress = lambda _step, _total, _loss: None
) -> Path:
    """Return the checkpoint folder of an original, trained now if it is not cached.

    Args:
        recipe: A recipe, or the name of one.
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
        model, tokenizer = train(recipe, progress)
        temporary.mkdir(parents=True)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / "original.json").write_text(recipe.model_dump_json(indent=2), encoding="utf-8")
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
    versions = [importlib.metadata.version(p) for p in ("torch", "transformers", "numpy")]
    text = json.dumps([recipe.model_dump(), versions, [hashlib.sha256(s).hexdigest() for s in sources]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tasks.make_tokenizer()
    try:
        config = AutoConfig.for_model(
            recipe.model_type,
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            router_aux_loss_coef=recipe.aux_coef,
            **recipe.architecture,
        )
    except ValueError as e:
        raise UsageError(f"original {recipe.name}: {e}") from e
    torch.manual_seed(recipe.seed)
    model = AutoModelForCausalLM.from_config(config)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * _schedule(step, recipe)
        batch = tasks.draw(recipe.task, recipe.seed, "training", step, recipe.batch_size)
        tokens, attention, mask = tasks.encode(batch, tokenizer)
        out = model(input_ids=tokens, attention_mask=attention, output_router_logits=True, use_cache=False)
        logprobs = out.logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        loss = -(logprobs * mask[:, 1:]).sum() / mask.sum()
        (loss + recipe.aux_coef * out.aux_loss).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress(step + 1, recipe.steps, float(loss.detach()))
    return model.eval(), tokenizer


def _schedule(step: int, recipe: OriginalRecipe) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    return min((step + 1) / recipe.warmup_steps, 1.0) * (0.05 + 0.95 * cosine)
