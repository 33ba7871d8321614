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


class CleanTraces:
    """The clean traces of the bench, each run once: by mode and by the RL settings of a fault's arms."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._traces: dict[tuple[str, RLSpec], Any] = {}

    def twin(self, fault: FaultSpec) -> Any:
        """Return the clean twin of a fault in its own mode."""
        key = (fault.mode, settings_of(SMALL, fault))
        if key not in self._traces:
            self._traces[key] = self._bench.run(fault.mode, rl=key[1])[0]
        return self._traces[key]

    def __getitem__(self, mode: str) -> Any:
        """Return the clean trace of a mode, with the library's operators."""
        return self.twin(find("noop" if mode == "replay" else "null_sampling_changed"))


@pytest.fixture(scope="session")
def clean(bench: Bench) -> CleanTraces:
    return CleanTraces(bench)
