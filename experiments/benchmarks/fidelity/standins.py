"""The stand-ins that people use instead of a pruned proxy: fewer layers, or weights that nobody trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from experiments.benchmarks.fidelity.bank import Bank, Subject, default_proxy

KEPT_LAYERS = 2


def truncated(bank: Bank, pair: str) -> Subject:
    """The original's first two decoder layers with all of their experts, as depth-truncated checkpoints are made."""
    source = bank.models(default_proxy(pair))["original"].folder
    folder = bank.home / "standins" / f"{pair}-first-{KEPT_LAYERS}-layers"
    if not folder.exists():
        config = json.loads((source / "config.json").read_text())
        config["num_hidden_layers"] = KEPT_LAYERS
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:KEPT_LAYERS]
        _write(source, folder, config, pretrained=True)
    return Subject(pair, folder=str(folder))


def random_weights(bank: Bank, pair: str) -> Subject:
    """The default proxy's configuration with freshly initialised weights."""
    source = bank.models(default_proxy(pair))["proxy"].folder
    folder = bank.home / "standins" / f"{pair}-random-weights"
    if not folder.exists():
        _write(source, folder, json.loads((source / "config.json").read_text()), pretrained=False)
    return Subject(pair, folder=str(folder))


def _write(source: Path, folder: Path, config: dict[str, object], *, pretrained: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    temporary = folder.with_name(f".{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    (temporary / "config.json").write_text(json.dumps(config))
    settings = AutoConfig.from_pretrained(temporary)
    torch.manual_seed(0)
    if pretrained:
        model = AutoModelForCausalLM.from_pretrained(source, config=settings, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    model.save_pretrained(temporary)
    AutoTokenizer.from_pretrained(source).save_pretrained(temporary)
    temporary.rename(folder)
