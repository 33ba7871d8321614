"""Shared fixtures: a tiny random Qwen3-MoE checkpoint, and a way to run arms on it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from harness.catalogue import find
from harness.seams import FaultRef
from harness.spec import RLSpec, RunSpec, SideSpec, TaskSpec

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

SMALL = RLSpec(
    prompts_per_step=4,
    group_size=4,
    updates_per_rollout=2,
    micro_batches=2,
    max_new_tokens=6,
    temperature=0.8,
    lr=1e-3,
    eps=1e-5,  # with 1e-8 the first Adam step turns rounding noise of zero gradients into full steps
    rollout=SideSpec(attention="eager"),
)


def make_checkpoint(folder: Path, *, experts: int = 8, layers: int = 2, seed: int = 0) -> Path:
    """Save a random Qwen3-MoE with the character tokenizer of the tasks."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from harness.rl.tasks import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,  # large enough that routing and sampling are far from uniform
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _one_quiet_thread() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "original")


class Bench:
    """Runs arms on one checkpoint, replaying one tape."""

    def __init__(self, folder: Path, tape: Path) -> None:
        self.folder, self.tape = folder, tape

    def run(
        self,
        mode: str = "replay",
        fault: FaultRef | None = None,
        *,
        steps: int = 4,
        seed: int = 0,
        rl: RLSpec = SMALL,
        record: Path | None = None,
        inspect: Callable[[Any], Any] | None = None,
    ) -> tuple[Any, int]:
        """Return the trace and the number of steps in which the fault fired."""
        from harness.inject import Injection
        from harness.rl import loop
        from harness.rl.run import Run
        from harness.trace import Trace

        records: list[Any] = []
        spec = RunSpec(weights="test", task=TaskSpec(), rl=rl, mode=mode, steps=steps, seed=seed)
        run = Run(spec, self.folder, records.append, self.tape if mode == "replay" else None)
        tape = run.record_tape() if record else None
        if inspect is not None:
            inspect(run)
        injection = Injection(find(fault.name), fault, run) if fault is not None else nullcontext()
        with injection:
            steps_ = run.contexts() if fault is None else injection.steps(run.contexts())
            loop.run(run.recorder.stages, run.recorder.steps(steps_))
        if tape is not None and record is not None:
            tape.save(record)
        return Trace(records), 0 if fault is None else injection.fired


@pytest.fixture(scope="session")
def bench(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    tape = tmp_path_factory.mktemp("tape") / "tape.safetensors"
    bench = Bench(checkpoint, tape)
    bench.run("free", record=tape)
    return bench


@pytest.fixture(scope="session")
def clean(bench: Bench) -> dict[str, Any]:
    return {mode: bench.run(mode)[0] for mode in ("free", "replay")}
