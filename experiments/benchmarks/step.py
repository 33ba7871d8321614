"""Our step against TRL's GRPOTrainer: same model, same prompts per step, same updates per rollout, one thread.

Both sides run in turn in this process, so that the ratio of a round holds although the machine's speed drifts. One of
our steps is one rollout with its mini-batch updates; TRL does the same in ``updates_per_rollout`` optimiser steps.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

GOALS = {"free": 0.75, "replay": 0.5, "one more fault": 0.25}


def ours(spec: Any, folder: Path, tape: Path | None, record: Path | None = None) -> tuple[float, float]:
    """Return seconds per step with everything recorded, and seconds to load."""
    from harness.rl import loop
    from harness.rl.run import Run

    started = time.perf_counter()
    run = Run(spec, folder, lambda _record: None, tape)
    kept = run.record_tape() if record else None
    ready = time.perf_counter()
    loop.run(run.recorder.stages, run.recorder.steps(run.contexts()))
    seconds = time.perf_counter() - ready
    if kept is not None and record is not None:
        kept.save(record)
    return seconds / spec.steps, ready - started


def trl(spec: Any, folder: Path, scratch: Path) -> tuple[float, float]:
    """Return TRL's seconds per rollout with its updates, and the seconds around them (trainer, first step)."""
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from harness.rl.tasks import prompt_batch, reward_of

    rl = spec.rl
    sequences = rl.prompts_per_step * rl.group_size
    micro = sequences // rl.updates_per_rollout // rl.micro_batches
    problems = [p for step in range(spec.steps) for p in prompt_batch(spec.task, 0, step, rl.prompts_per_step)]
    stamps: list[float] = []

    class Stamp(TrainerCallback):
        """Takes the time at the end of every optimiser step."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """Take the time."""
            stamps.append(time.perf_counter())

    started = time.perf_counter()
    args = GRPOConfig(
        output_dir=str(scratch),
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        beta=rl.beta,
        router_aux_loss_coef=rl.aux_coef,
        temperature=rl.temperature,
        learning_rate=rl.lr,
        lr_scheduler_type="constant",
        adam_epsilon=rl.eps,
        max_grad_norm=rl.max_grad_norm,
        max_completion_length=rl.max_new_tokens,
        num_generations=rl.group_size,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rl.micro_batches,
        steps_per_generation=rl.updates_per_rollout * rl.micro_batches,
        max_steps=spec.steps * rl.updates_per_rollout,
        activation_checkpointing=False,
        use_bias_correction_kl=False,
        shuffle_dataset=False,
        model_init_kwargs={"dtype": "float32"},
    )
    data = {"prompt": [p.prompt for p in problems], "answer": [p.answer for p in problems]}
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=lambda completions, answer, **_: [
            reward_of(a, c) for a, c in zip(answer, completions, strict=True)
        ],
        args=args,
        train_dataset=Dataset.from_dict(data),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        callbacks=[Stamp()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    whole = time.perf_counter() - started
    first = rl.updates_per_rollout  # the first rollout warms up
    seconds = (stamps[-1] - stamps[first - 1]) / (spec.steps - 1)
    return seconds, whole - seconds * spec.steps


def spread(values: list[float]) -> str:
    """Median with minimum and maximum."""
    return f"{statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]"


def measure(pair_name: str, rounds: int, steps: int) -> dict[str, Any]:
    """Measure rounds of (ours free, ours replay, TRL) on both models of a pair."""
    from harness import pairs
    from harness.spec import RunSpec, load_pair
    from harness.store import harness_home

    pair = load_pair(pair_name)
    models = pairs.prepare(pair, harness_home(), lambda *_: None)
    found: dict[str, Any] = {"pair": pair_name, "rounds": rounds, "steps": steps, "models": {}}
    with tempfile.TemporaryDirectory() as folder:
        tape = Path(folder) / "tape.safetensors"
        for name, model in models.items():
            settings = {"weights": model.digest, "task": pair.task, "rl": pair.rl, "steps": steps, "seed": 0}
            free, replay = RunSpec(**settings, mode="free"), RunSpec(**settings, mode="replay")
            rows: dict[str, list[float]] = {"free": [], "replay": [], "trl": [], "load": [], "trl_load": []}
            for _ in range(rounds):
                seconds, load = ours(free, model.folder, None, tape)
                rows["free"].append(seconds)
                rows["load"].append(load)
                rows["replay"].append(ours(replay, model.folder, tape)[0])
                seconds, load = trl(free, model.folder, Path(folder))
                rows["trl"].append(seconds)
                rows["trl_load"].append(load)
            rows["free / trl"] = [a / b for a, b in zip(rows["free"], rows["trl"], strict=True)]
            rows["replay / trl"] = [a / b for a, b in zip(rows["replay"], rows["trl"], strict=True)]
            found["models"][name] = rows
    found["one more fault"] = one_more_fault(found["models"], pair.steps)
    return found


def one_more_fault(models: dict[str, dict[str, list[float]]], steps: int, seeds: int = 3) -> list[float]:
    """Return, per round, the cost of one more fault in replay over that of finding out by hand with TRL.

    One more fault costs its faulted arms: 2 models x 3 seeds; tapes, clean and null arms are there. By hand it takes
    2 models x 3 seeds x (clean, faulted) = 12 runs of TRL. Start-up of each run is counted on both sides; imports are
    on neither.
    """
    ratios = []
    for i in range(len(models["original"]["free"])):
        mine = sum(seeds * (m["replay"][i] * steps + m["load"][i]) for m in models.values())
        hand = sum(2 * seeds * (m["trl"][i] * steps + m["trl_load"][i]) for m in models.values())
        ratios.append(mine / hand)
    return ratios


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", default="tiny-qwen3-moe")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    found = measure(options.pair, options.rounds, options.steps)
    print(f"{options.pair}, {options.rounds} rounds of {options.steps} steps in turn, 1 thread; median [min, max]")
    for name, rows in found["models"].items():
        shown = ", ".join(f"{side} {spread(rows[side])}" for side in ("free", "replay", "trl"))
        print(f"{name}: seconds per step: {shown}")
        for mode in ("free", "replay"):
            print(f"{name}: {mode} / trl {spread(rows[f'{mode} / trl'])}, goal at most {GOALS[mode]}")
    ratio, goal = spread(found["one more fault"]), GOALS["one more fault"]
    print(f"one more fault / by hand with TRL (12 runs) {ratio}, goal at most {goal}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
