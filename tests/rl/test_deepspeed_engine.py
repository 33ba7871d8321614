"""The DeepSpeed engine against the torch engine, in one fresh process that has no compiler."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.catalogue import find
from harness.errors import UsageError
from harness.inject import Injection, rewrite_config
from harness.rl.engines.deepspeed_engine import settings
from harness.seams import FaultRef, Schedule
from harness.spec import RLSpec, RunSpec, SideSpec, TaskSpec
from tests.conftest import SMALL, Bench

ROOT = Path(__file__).parents[2]
STEPS = 20
STAGES = (0, 1, 2, 3)
TIGHT = 1e-9  # a clipping limit so far below Adam's epsilon that it bounds the updates


def zero(stage: int, clipping: float = SMALL.max_grad_norm) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "gradient_clipping": clipping}


class Arms:
    """Runs arms in this process, on the torch engine where no DeepSpeed configuration is given."""

    def __init__(self, folder: Path, tape: Path) -> None:
        self.folder, self.tape = folder, tape

    def __call__(
        self, config: dict[str, Any] | None, *, steps: int = 3, fault: FaultRef | None = None, tamper: Any = None
    ) -> dict[str, Any]:
        from harness.rl import loop
        from harness.rl.run import Run
        from harness.trace import Trace

        records: list[Any] = []
        spec = RunSpec(
            weights="test",
            rl=SMALL,
            task=TaskSpec(),
            engine="torch" if config is None else "deepspeed",
            deepspeed=config or {},
            steps=steps,
            seed=0,
        )
        run = Run(spec, self.folder, records.append, self.tape)
        if tamper is not None:
            tamper(run)
        with nullcontext() if fault is None else Injection(find(fault.name), fault, run) as injection:
            contexts = run.contexts() if injection is None else injection.steps(run.contexts())
            loop.run(run.recorder.stages, run.recorder.steps(contexts))
        trace = Trace(records)
        names = (
            "loss",
            "grad_norm",
            "grad_norm/router",
            "grad_norm/experts",
            "entropy",
            "update_norm",
            "skipped_steps",
        )
        return {"effective": run.engine.effective(), **{name: list(trace.column(name)) for name in names}}


def nan_loss(run: Any) -> None:
    inner = run.stages.loss

    def loss(ctx: Any, forward: Any) -> Any:
        clean = inner(ctx, forward)
        return replace(clean, value=clean.value * math.nan) if ctx.step == 1 else clean

    run.stages.loss = loss


def doubled_head(run: Any) -> None:
    import torch

    inner = run.stages.prompts

    def prompts(ctx: Any) -> Any:
        if ctx.step == 1:
            with torch.no_grad(), ctx.trainer.whole(write=True):
                ctx.trainer.model.lm_head.weight.mul_(2)
        return inner(ctx)

    run.stages.prompts = prompts


def refusal(attempt: Callable[[], Any]) -> dict[str, str]:
    with pytest.raises(UsageError) as caught:
        attempt()
    return {"message": str(caught.value)}


def child(folder: str, tape: str, out: str) -> None:
    """Run every arm that the tests look at."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    arm, results = Arms(Path(folder), Path(tape)), {}
    results["torch"] = arm(None, steps=STEPS)
    topk = find("norm_topk_prob_ignored").ref(schedule=Schedule(1))
    results["torch/fault"], results["torch/doubled"] = arm(None, fault=topk), arm(None, tamper=doubled_head)
    for stage in STAGES:
        results[f"zero{stage}"] = arm(zero(stage), steps=STEPS)
        results[f"zero{stage}/nan"] = arm(zero(stage), tamper=nan_loss)
        results[f"zero{stage}/fault"] = arm(zero(stage), fault=topk)
        results[f"zero{stage}/doubled"] = arm(zero(stage), tamper=doubled_head)
    results["again"] = arm(zero(1))
    clipping = find("deepspeed_clipping_default")
    results["clean"] = arm(zero(1, TIGHT))
    results["default"] = arm(rewrite_config(clipping, clipping.ref(), zero(1, TIGHT)))
    backward = find("attention_backward_nan").ref(schedule=Schedule(1))
    results["zero3/backward"] = arm(zero(3), fault=backward)
    results["owned"] = refusal(lambda: arm(zero(1), fault=find("grad_overflow").ref(schedule=Schedule(1))))
    results["refused"] = refusal(lambda: arm({"zero_optimization": {"stage": 1, "stge": 2}}))
    Path(out).write_text(json.dumps(results), encoding="utf-8")


@pytest.fixture(scope="module")
def seen(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    home = tmp_path_factory.mktemp("deepspeed")
    bench.run("free", steps=STEPS, record=home / "tape.safetensors")
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")},
        "PATH": str(home),  # no compiler to be found
        "TORCH_EXTENSIONS_DIR": str(home / "built"),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(bench.folder), str(home / "tape.safetensors"), str(home / "out.json")],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, dict[str, Any]] = json.loads((home / "out.json").read_text())
    results["process"] = {"stdout": done.stdout, "stderr": done.stderr, "built": (home / "built").exists()}
    return results


@pytest.mark.deepspeed
def test_nothing_is_compiled_and_nothing_is_said(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["process"] == {"stdout": "", "stderr": "", "built": False}


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("metric", ["loss", "grad_norm", "grad_norm/router", "grad_norm/experts", "update_norm"])
def test_every_zero_stage_agrees_with_torch_over_twenty_steps(
    seen: dict[str, dict[str, Any]], stage: int, metric: str
) -> None:
    assert seen["torch"]["effective"]["lr"] == seen[f"zero{stage}"]["effective"]["lr"] == SMALL.lr
    assert max(seen["torch"]["grad_norm"]) > SMALL.max_grad_norm  # or clipping would not be compared
    assert seen[f"zero{stage}"][metric] == pytest.approx(seen["torch"][metric], rel=1e-5, abs=1e-7)


@pytest.mark.deepspeed
def test_settings_are_read_back_from_the_engine(seen: dict[str, dict[str, Any]]) -> None:
    for stage in STAGES:
        effective = seen[f"zero{stage}"]["effective"]
        assert effective["zero_stage"] == stage
        assert effective["gradient_clipping"] == SMALL.max_grad_norm
        assert effective["gradient_accumulation_steps"] == SMALL.micro_batches == 2
        assert effective["train_micro_batch_size_per_gpu"] == 4  # 4 x 4 sequences in 2 x 2 parts
        assert effective["betas"] == list(SMALL.betas)
        assert effective["dtype"] == "float32"


@pytest.mark.deepspeed
def test_a_second_engine_in_the_process_gives_the_same_trace(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["again"]["effective"] == seen["zero1"]["effective"]
    for metric in ("loss", "grad_norm", "update_norm", "entropy"):
        assert seen["again"][metric] == seen["zero1"][metric][:3]


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_module_faults_work_under_the_engine(seen: dict[str, dict[str, Any]], stage: int) -> None:
    assert seen["torch/fault"]["loss"][-1] != pytest.approx(seen["torch"]["loss"][2], rel=1e-2)
    assert seen[f"zero{stage}/fault"]["loss"] == pytest.approx(seen["torch/fault"]["loss"], rel=1e-5, abs=1e-7)


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_weights_written_from_outside_reach_the_master_copies(seen: dict[str, dict[str, Any]], stage: int) -> None:
    expected = seen["torch/doubled"]
    assert expected["entropy"][-1] < 0.9 * seen["torch"]["entropy"][2]  # doubled logits are sharper, and stay so
    for metric in ("entropy", "grad_norm", "update_norm"):
        assert seen[f"zero{stage}/doubled"][metric] == pytest.approx(expected[metric], rel=1e-5)


@pytest.mark.deepspeed
def test_a_nan_gradient_is_stepped_on_without_zero_and_skipped_with_it(seen: dict[str, dict[str, Any]]) -> None:
    plain = seen["zero0/nan"]
    assert plain["skipped_steps"] == [0, 0, 0]
    assert math.isnan(plain["grad_norm"][1])
    assert math.isnan(plain["loss"][2])
    for stage in (1, 2, 3):
        run = seen[f"zero{stage}/nan"]
        assert run["skipped_steps"] == [0, SMALL.updates_per_rollout, 0]
        assert run["grad_norm"][1] == math.inf
        assert math.isnan(run["grad_norm/router"][1])
        assert run["update_norm"][1] == 0.0
        assert math.isfinite(run["loss"][2])


@pytest.mark.deepspeed
def test_dropping_the_clipping_key_changes_the_limit_and_the_updates(seen: dict[str, dict[str, Any]]) -> None:
    clean, faulty = seen["clean"], seen["default"]
    assert clean["effective"]["gradient_clipping"] == TIGHT
    assert faulty["effective"]["gradient_clipping"] == 1.0
    assert faulty["effective"] == {**clean["effective"], "gradient_clipping": 1.0}
    assert faulty["update_norm"] == seen["zero1"]["update_norm"][:3]  # which asks for 1.0
    # AdamW without decay: |update| <= lr * |mean of clipped gradients| / eps, in each update of a step
    bound = SMALL.updates_per_rollout * SMALL.lr * TIGHT / SMALL.eps
    assert all(0.1 * bound < norm <= bound * (1 + 1e-3) for norm in clean["update_norm"])
    assert min(faulty["update_norm"]) > 100 * bound


@pytest.mark.deepspeed
def test_a_stage_of_the_engine_takes_no_fault(seen: dict[str, dict[str, Any]]) -> None:
    assert "stage clip, which engine deepspeed owns" in seen["owned"]["message"]


@pytest.mark.deepspeed
def test_what_deepspeed_refuses_is_one_sentence(seen: dict[str, dict[str, Any]]) -> None:
    message = seen["refused"]["message"]
    assert "\n" not in message
    assert "stge: Extra inputs are not permitted (got 2)" in message


@pytest.mark.parametrize(
    ("config", "changes", "complaint"),
    [
        ({"gradient_accumulation_steps": 4}, {}, "gradient_accumulation_steps is 4, but the RL settings make it 2"),
        ({"train_micro_batch_size_per_gpu": 3}, {}, "is 3, but the RL settings make it 4"),
        ({"train_batch_size": 8}, {"group_size": 8}, "train_batch_size is 8, but the RL settings make it 16"),
        ({"optimizer": {"type": "Adam"}}, {}, "deepspeed.optimizer is not used"),
        ({"gradient_clipping": -1}, {}, "gradient_clipping must be a finite number .* got -1"),
        ({"gradient_clipping": math.nan}, {}, "got nan"),
        ({"zero_optimization": 3}, {}, "zero_optimization must be a mapping of settings, got 3"),
        ({"bf16": {"enabled": True}}, {}, "bf16.enabled is True, but rl.trainer.dtype is float32"),
        ({"bf16": {"enabled": False}}, {"trainer": SideSpec(dtype="bfloat16")}, "bf16.enabled is False"),
        ({}, {"loss_scale": 8.0}, "rl.loss_scale 8 is not used"),
    ],
)
def test_contradictions_are_refused(config: dict[str, Any], changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        settings(config, SMALL.model_copy(update=changes), 1)


def test_sizes_come_from_the_rl_settings_and_clipping_does_not() -> None:
    rl = RLSpec(trainer=SideSpec(dtype="bfloat16"))  # 8 x 8 sequences in 4 x 2 parts
    complete = settings({"bf16": {"check_grad_overflow": False}}, rl, 2)
    assert complete["train_micro_batch_size_per_gpu"] == 8
    assert complete["gradient_accumulation_steps"] == 2
    assert complete["train_batch_size"] == 32
    assert complete["bf16"] == {"check_grad_overflow": False, "enabled": True}
    assert "gradient_clipping" not in complete


if __name__ == "__main__":
    child(*sys.argv[1:])


def test_a_backward_fault_reaches_partitioned_weights(seen: dict[str, dict[str, Any]]) -> None:
    faulty, healthy = seen["zero3/backward"], seen["zero3"]
    assert faulty["grad_norm"][0] == healthy["grad_norm"][0]
    assert math.isfinite(faulty["loss"][1])
    assert not math.isfinite(faulty["grad_norm"][1])
