"""Shared fixtures: a tiny random Qwen3-MoE checkpoint, and a way to run arms on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from harness.testing import SMALL, Bench, make_checkpoint

__all__ = ["SMALL", "Bench", "make_checkpoint"]

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="session", autouse=True)
def _one_quiet_thread() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "original")


@pytest.fixture(scope="session")
def bench(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    tape = tmp_path_factory.mktemp("tape") / "tape.safetensors"
    bench = Bench(checkpoint, tape)
    bench.run("free", record=tape)
    return bench


@pytest.fixture(scope="session")
def clean(bench: Bench) -> dict[str, Any]:
    return {mode: bench.run(mode)[0] for mode in ("free", "replay")}
