"""What a fault is tried on: a random Qwen3-MoE that fits anywhere, and a bench that runs short arms on it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.catalogue import find_entry
from harness.spec import Mode, RLSpec, RunSpec, SideSpec, TaskSpec

if TYPE_CHECKING:
    from harness.rl.run import Run
    from harness.seams import FaultRef
    from harness.trace import StepRecord, Trace

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


def make_checkpoint(folder: Path, *, experts: int = 8, layers: int = 2, kv_heads: int = 1, seed: int = 0) -> Path:
    """Save a random Qwen3-MoE with the character tokenizer of the tasks.

    Args:
        folder: Where to save it.
        experts: Experts per layer, of which two are chosen per token.
        layers: Number of layers.
        kv_heads: Groups of two attention heads that share keys and values.
        seed: Seed of the weights.

    Returns:
        The folder.
    """
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
        num_attention_heads=2 * kv_heads,
        num_key_value_heads=kv_heads,
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


class Bench:
    """Runs short arms on one checkpoint, replaying one tape.

    Attributes:
        folder: The checkpoint.
        tape: The tape; ``run(record=tape)`` makes it.
    """

    def __init__(self, folder: Path, tape: Path) -> None:
        self.folder, self.tape = folder, tape

    def run(
        self,
        mode: Mode = "replay",
        fault: FaultRef | None = None,
        remedy: FaultRef | None = None,
        *,
        steps: int = 4,
        seed: int = 0,
        rl: RLSpec = SMALL,
        record: Path | None = None,
        inspect: Callable[[Run], Any] | None = None,
    ) -> tuple[Trace, int]:
        """Run one arm.

        Args:
            mode: ``free`` or ``replay``.
            fault: What is installed; None for a clean arm.
            remedy: What is installed around it.
            steps: Number of steps.
            seed: Seed of the run.
            rl: RL settings.
            record: Where to keep a tape of the run.
            inspect: Called with the run before anything is installed.

        Returns:
            The trace, and the number of steps in which the fault (without one, the remedy) fired.
        """
        from harness.inject import Injection, steps_of
        from harness.plan import settings_of
        from harness.rl import loop
        from harness.rl.run import Run
        from harness.trace import Trace

        records: list[StepRecord] = []
        rl = rl if fault is None else settings_of(rl, find_entry(fault.name))
        spec = RunSpec(weights="test", task=TaskSpec(), rl=rl, mode=mode, steps=steps, seed=seed)
        run: Any = Run(spec, self.folder, records.append, self.tape if mode == "replay" else None)
        tape = run.record_tape() if record else None
        if inspect is not None:
            inspect(run)
        given = [ref for ref in (fault, remedy) if ref is not None]
        with ExitStack() as stack:
            installed = [stack.enter_context(Injection(find_entry(ref.name), ref, run)) for ref in given]
            loop.run(run.recorder.stages, run.recorder.steps(steps_of(installed, run.contexts())))
        if tape is not None and record is not None:
            tape.save(record)
        return Trace(records), installed[0].fired if installed else 0
