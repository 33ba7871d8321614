"""One small log per format, written by hand, and the numbers that it holds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UsageError
from harness.importers.base import detect, formats
from harness.importers.reading import import_logs

NAN, INF = math.nan, math.inf

VERL = (
    "\x1b[36m(TaskRunner pid=71)\x1b[0m step:1 - actor/pg_loss:0.5 - actor/loss:9.0 - actor/kl_loss:np.float64(0.25)"
    " - actor/ppo_kl:7.0 - actor/grad_norm:1e-3 - critic/score/mean:2.0 - critic/rewards/mean:0.125"
    " - val-core/gsm8k/acc:0.9\n"
    "(TaskRunner pid=71) something else\n"
    "(TaskRunner pid=71) step:2 - actor/pg_loss:nan - actor/loss:9.0 - actor/kl_loss:-0.0 - actor/grad_norm:inf"
    " - response_length/mean:235.7\n81 - response_length/max:1,024.0\n"
)
TRL = (
    "  3%|3         | 5/100 [00:01<00:10,  1.0s/it]\n"
    "{'loss': 0.0, 'grad_norm': 0.5, 'learning_rate': 1e-06, 'completions/mean_length'\n: 12.5, 'reward': -0.25, "
    "'clip_ratio/region_mean': 0.0, 'epoch': 0.1}\n"
    "{'eval_loss': 3.0, 'eval_reward': 1.0, 'epoch': 0.1}\n"
    "{'loss': -0.0, 'grad_norm': nan, 'learning_rate': 2e-06, 'kl': np.float64(0.5), 'reward': 1.0, 'epoch': 0.2}\n"
    "{'train_runtime': 3.0, 'train_loss': 0.1, 'epoch': 0.2}\n"
    "{'loss': 0.75, 'grad_norm': 4.0, 'rewa"
)
SWIFT = (
    '{"loss": 1.5, "grad_norm": 0.5, "reward": 0.25, "global_step/max_steps": "7/500", "elapsed_time": "1m"}\n'
    '{"loss": 1.25, "grad_norm": 0.75, "reward": 0.5, "global_step/max_steps": "9/500", "memory(GiB)": 3.5}\n'
    '{"last_model_checkpoint": "out/9", "memory(GiB)": 3.5}\n'
)
MEGATRON = (
    "t norm: 9.9 | number of nan iterations:   0 |\n"
    " iteration        5/     100 | lm loss: 2.500000E+00 | learning rate: 1.5E-04 | grad norm: 0.25 |\n"
    " iteration        6/     100 | consumed samples:  20 | learning rate: 1.5E-04 | grad norm: nan |\n"
)
MINDSPEED = (
    "[2025-01-01 00:00:00] iteration: 1 / 20 | grpo/score/mean : 0.5000 | actor/pg_loss : 0.0000 | grad_norm : 0.3000\n"
    "[2025-01-01 00:00:09] iteration: 2 / 20 | grpo/score/mean : 0.2500 | actor/pg_loss : nan | grad_norm : inf\n"
)
TITAN = (
    "[titan] 2026 - root - INFO - step:  4  loss:  7.5  grad_norm: 26.0000  memory: 66.91GiB  tps: 10,050\n"
    "[titan] 2026 - root - INFO - step:  4  loss:  7.5  grad_norm: 26.0000  memory: 66.91GiB  tps: 10,049\n"
    "[titan] 2026 - root - INFO - step: 10  loss:  3.25  grad_norm: 12.0000  memory: 66.91GiB  tps: 9,961\n"
)
PRIME = "02:40:52 SUCCESS Step 3 | Time: 5.13s | Loss: 12.25 | Grad. Norm: 28.5 | LR: 1.00e-06 | Mismatch KL: 0.01\n"
SLIME = (
    "(RolloutManager pid=3) rollout 0: {'rollout/raw_reward': 0.5, 'rollout/response_len/mean': 100.0}\n"
    "step 0: {'train/pg_loss': -0.25, 'train/grad_norm': 0.5, 'train/step': 0}\n"
    "step 1: {'train/pg_loss': 0.125, 'train/grad_norm': inf, 'train/step': 1}\n"
)
LLAMA = (
    "  1%|#   | 9/860 [00:43<1:05:18,  4.60s/it]{'loss': nan, 'reward': 0.25, 'epoch': 0.21}\n"
    "  2%|##  | 19/860 [01:30<1:07:22,  4.81s/it]{'loss': 0.5, 'reward': -0.5, 'epoch': 0.44}\n"
)
BARS = (
    "Epoch 1/1:   0%| | 0/900 [00:04<?, ?it/s, loss: 11.5, grad_norm: 29.50, lr: 1e-08]\r"
    "Epoch 1/1:   0%| | 1/900 [00:04<75:39,  4.02s/it, loss: 11.5, grad_norm: 29.50, lr: 1e-08]\r"
    "Epoch 1/1:   0%| | 1/900 [00:05<75:39,  4.02s/it, loss: 11.25, grad_norm: nan, lr: 2e-08]\n"
)
OPENRLHF = (
    "Train epoch [1/1]:  50%|#| 1/2 [00:10<00:10, 10.0s/it, act_loss=-0.5, kl=0.25, reward=0.5, gen_len=120]\n"
    "Train epoch [1/1]: 100%|#| 2/2 [00:20<00:00, 10.0s/it, act_loss=nan, kl=0.5, reward=0.75, gen_len=130]\n"
)
NEMO = (
    "  • Loss: 8.0\n"
    "========================= Step 1/100 =========================\n"
    "Training Results:\n  • Loss: 0.0125\n  • Avg Reward: 0.5\n  • Mean Generation Length: 120.5\n"
    "========================= Step 2/100 =========================\n"
    "  • Loss: inf\n  • Avg Reward: 0.25\n"
)
LONG = (
    "| step | loss | entropy | MFU |\n|-----:|------|---------|-----|\n"
    "| 5 | 4.5 | **nan** | \u2014 |\n| 10 | **0** | .5 | 27.5 % |\n"
)
WIDE = "| step | 1 | 2 | \u2192 eval@20 |\n|---|---|---|---|\n| reward | .5 | .25 | **0.9** |\n"
ALIGNED = "Step  loss  grad_norm\n1     0     0.5\n...\n10    0     0.25\n"
ARMS = "| arm | TP | step0 | step1 |\n|---|---|---|---|\n| a | 4 | 0.5 | 0.25 |\n| b | 8 | 1.5 | nan |\n"
SERIES = "- zero1: 11.5 -> 11.25\n- zero2: 11.5 -> nan\n"
PAIRS = (
    "loss diff 0.5:: stage 0: step2.0, loss 3.5 stage1: step2.0, loss 3.0\n"
    "loss diff 0.5:: stage 0: step4.0, loss 2.5 stage1: step4.0, loss 2.0\n"
)
VERL_JSONL = (
    '{"step": 1, "data": {"actor/pg_loss": 0.5, "actor/grad_norm": null}}\n'
    '{"step": 2, "data": {"actor/pg_loss": 0.25}}\n'
)
STATE = (
    '{"log_history": [{"loss": 0.5, "grad_norm": NaN, "step": 10}, {"eval_loss": 1.0, "step": 10}, '
    '{"loss": 0.25, "kl": null, "step": 20}, {"train_runtime": 5.0, "step": 20}]}'
)
CSV = "step,loss,note\n0,0.5,a\n1,,b\n2,-0.0,c\n"
WANDB = (
    '"Step","one - train/loss","one - train/loss__MIN","two - train/loss"\n"0","0.5","0.4",""\n"1","NaN","0.4","0.25"\n'
)
SWANLAB = "step,one-train/loss,one-train/loss_timestamp\n0,0.5,1700000000\n1,Infinity,1700000001\n"
JSONL = '{"step": 3, "loss": 0.5, "kl": "nan", "note": "x"}\n{"step": 4, "loss": "-inf"}\n{"step": 5, "lo'
MONITOR = (
    "vpp_stage,name,step,norm,min,max,mean,nans,shape,dtype\n"
    '0,layers.0.mlp.experts.0.weight,3,3.0,-1.0,1.0,0.0,0.0,"[2, 2]",torch.bfloat16\n'
    '0,layers.0.mlp.gate.weight,3,4.0,-1.0,1.0,0.0,0.0,"[2, 2]",torch.bfloat16\n'
    '0,layers.0.mlp.experts.0.weight,4,nan,-1.0,inf,0.0,1.0,"[2, 2]",torch.bfloat16\n'
)
GRAD_PROBE = 'param_name,MD5,max,min,norm,shape\nlayers.0.self_attn.q.weight,e2863940,2.0,-2.0,6.0,"[2, 2]"\n' + (
    "model.norm.weight,e2863941,2.0,-2.0,8.0,[2]\n"
)
OVERFLOW = (
    '{"task": "overflow_check", "level": "L1", "dump_data_dir": null, "data": {\n'
    ' "Functional.linear.3.forward": {"input_args": [{"Max": 1.0}], "output": [{"Max": Infinity, "Min": -2.0}]},\n'
    ' "Tensor.mul.7.forward": {"input_args": [{"Max": 65504.0}], "output": [{"Max": 65504.0}]}}}\n'
)

Expected = dict[str, dict[str, Any]]
CASES: dict[str, tuple[str, str, str, Expected]] = {
    "verl": (
        "verl-console",
        "a.log",
        VERL,
        {
            "a.log": {
                "steps": [1, 2],
                "loss": [0.5, NAN],
                "kl": [0.25, -0.0],
                "grad_norm": [1e-3, INF],
                "reward": [0.125, None],
                "response_length": [None, 235.781],
                "response_length/max": [None, 1024.0],
                "val-core/gsm8k/acc": None,
            }
        },
    ),
    "trl": (
        "trl",
        "a.log",
        TRL,
        {
            "a.log": {
                "steps": [1, 2, 3],
                "loss": [0.0, -0.0, 0.75],
                "grad_norm": [0.5, NAN, 4.0],
                "kl": [None, 0.5, None],
                "reward": [-0.25, 1.0, None],
                "response_length": [12.5, None, None],
                "lr": [1e-6, 2e-6, None],
                "entropy": None,
                "train_loss": None,
            }
        },
    ),
    "swift": ("ms-swift", "logging.jsonl", SWIFT, {"logging.jsonl": {"steps": [7, 9], "loss": [1.5, 1.25]}}),
    "megatron": (
        "megatron",
        "a.log",
        MEGATRON,
        {"a.log": {"steps": [5, 6], "loss": [2.5, None], "grad_norm": [0.25, NAN], "lr": [1.5e-4, 1.5e-4]}},
    ),
    "mindspeed": (
        "mindspeed-rl",
        "a.log",
        MINDSPEED,
        {"a.log": {"steps": [1, 2], "loss": [0.0, NAN], "grad_norm": [0.3, INF], "reward": [0.5, 0.25]}},
    ),
    "torchtitan": (
        "torchtitan",
        "a.log",
        TITAN,
        {"a.log": {"steps": [4, 10], "loss": [7.5, 3.25], "grad_norm": [26.0, 12.0], "tps": [10050.0, 9961.0]}},
    ),
    "prime": ("prime-rl", "a.log", PRIME, {"a.log": {"steps": [3], "loss": [12.25], "logprob_gap": [0.01]}}),
    "slime": (
        "slime",
        "a.log",
        SLIME,
        {"a.log": {"steps": [0, 1], "loss": [-0.25, 0.125], "grad_norm": [0.5, INF], "reward": [0.5, None]}},
    ),
    "llamafactory": ("llamafactory", "a.log", LLAMA, {"a.log": {"steps": [9, 19], "loss": [NAN, 0.5]}}),
    "tqdm": (
        "tqdm",
        "a.log",
        BARS,
        {"a.log": {"steps": [1, 2], "loss": [11.5, 11.25], "grad_norm": [29.5, NAN], "lr": [1e-8, 2e-8]}},
    ),
    "openrlhf": (
        "openrlhf",
        "a.log",
        OPENRLHF,
        {"a.log": {"steps": [1, 2], "loss": [-0.5, NAN], "kl": [0.25, 0.5], "response_length": [120.0, 130.0]}},
    ),
    "nemo": (
        "nemo-rl",
        "a.log",
        NEMO,
        {"a.log": {"steps": [1, 2], "loss": [0.0125, INF], "reward": [0.5, 0.25], "response_length": [120.5, None]}},
    ),
    "long": (
        "markdown-table",
        "a.md",
        LONG,
        {"a.md": {"steps": [5, 10], "loss": [4.5, 0.0], "entropy": [NAN, 0.5], "MFU": [None, 0.275]}},
    ),
    "wide": ("markdown-table", "a.md", WIDE, {"a.md": {"steps": [1, 2], "reward": [0.5, 0.25]}}),
    "aligned": ("markdown-table", "a.md", ALIGNED, {"a.md": {"steps": [1, 10], "grad_norm": [0.5, 0.25]}}),
    "arms": (
        "markdown-table",
        "a.md",
        ARMS,
        {"a 4": {"steps": [0, 1], "value": [0.5, 0.25]}, "b 8": {"steps": [0, 1], "value": [1.5, NAN]}},
    ),
    "series": ("series", "a.md", SERIES, {"zero1": {"value": [11.5, 11.25]}, "zero2": {"value": [11.5, NAN]}}),
    "pairs": (
        "deepspeed",
        "a.log",
        PAIRS,
        {"stage 0": {"steps": [2, 4], "loss": [3.5, 2.5]}, "stage1": {"steps": [2, 4], "loss": [3.0, 2.0]}},
    ),
    "verl-jsonl": (
        "verl-jsonl",
        "a.jsonl",
        VERL_JSONL,
        {"a.jsonl": {"steps": [1, 2], "loss": [0.5, 0.25], "grad_norm": [NAN, None]}},
    ),
    "state": (
        "hf-trainer-state",
        "trainer_state.json",
        STATE,
        {"trainer_state.json": {"steps": [10, 20], "loss": [0.5, 0.25], "grad_norm": [NAN, None], "kl": None}},
    ),
    "csv": ("csv", "a.csv", CSV, {"a.csv": {"steps": [0, 2], "loss": [0.5, -0.0]}}),
    "wandb": (
        "wandb-csv",
        "a.csv",
        WANDB,
        {"one": {"steps": [0, 1], "loss": [0.5, NAN]}, "two": {"steps": [1], "loss": [0.25]}},
    ),
    "swanlab": ("swanlab-csv", "a.csv", SWANLAB, {"one": {"steps": [0, 1], "loss": [0.5, INF]}}),
    "msprobe-monitor": (
        "msprobe-monitor",
        "grad_reduced_3-4.csv",
        MONITOR,
        {
            "grad_reduced_3-4.csv": {
                "steps": [3, 4],
                "grad_norm": [5.0, NAN],
                "grad_norm/experts": [3.0, NAN],
                "grad_norm/router": [4.0, None],
                "layers.0.mlp.experts.0.weight/max": [1.0, INF],
                "layers.0.mlp.experts.0.weight/nans": [0.0, 1.0],
            }
        },
    ),
    "msprobe-grad": (
        "msprobe-grad",
        "grad_summary_7.csv",
        GRAD_PROBE,
        {
            "grad_summary_7.csv": {
                "steps": [7],
                "grad_norm": [10.0],
                "grad_norm/attention": [6.0],
                "grad_norm/norms": [8.0],
                "model.norm.weight/min": [-2.0],
            }
        },
    ),
    "msprobe-overflow": (
        "msprobe-overflow",
        "step5/rank0/dump.json",
        OVERFLOW,
        {"rank0": {"steps": [5], "overflow/operators": [2.0], "overflow/nonfinite": [1.0]}},
    ),
    "jsonl": ("jsonl", "a.jsonl", JSONL, {"a.jsonl": {"steps": [3, 4], "loss": [0.5, -INF], "kl": [NAN, None]}}),
}


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return str(path)


def same(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_of_a_log_are_those_that_it_prints(case: str, tmp_path: Path) -> None:
    form, name, text, expected = CASES[case]
    found = import_logs([write(tmp_path, name, text)])
    assert found.form == form
    assert list(found.runs) == list(expected)
    for label, metrics in expected.items():
        trace = found.runs[label]
        for metric, values in metrics.items():
            if metric == "steps":
                assert list(trace.steps) == values
            elif values is None:
                assert metric not in trace.metrics
            else:
                column = trace.column(metric)
                assert len(column) == len(values)
                assert all(map(same, column, values)), (metric, column)


def test_every_text_format_has_a_case() -> None:
    assert {case[0] for case in CASES.values()} == set(formats()) - {"tensorboard"}


@pytest.mark.parametrize("case", CASES)
def test_a_format_is_found_by_its_records_alone(case: str, tmp_path: Path) -> None:
    form, name, text, _ = CASES[case]
    assert detect(Path(write(tmp_path, name, text)), [text.encode()]).name == form


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("| train_step | KL |\n|---|---|\n| 0\u201350 | 0.29 |\n", "a.md:3: '0\u201350' is a range of steps"),
        ("| config | outcome |\n|---|---|\n| a | fine |\n", "a.md:1: a table without steps"),
        ("nothing of interest\n" * 3, "no known record"),
        ("", "no known record"),
    ],
)
def test_what_holds_no_trace_is_refused_with_the_reason(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r".*") as refused:
        import_logs([write(tmp_path, "a.md", text)])
    assert said in str(refused.value)


def test_a_step_with_two_values_is_an_error_with_both_lines(tmp_path: Path) -> None:
    text = "step:1 - actor/pg_loss:0.5\nstep:2 - actor/pg_loss:0.25\nstep:2 - actor/pg_loss:0.75\n"
    with pytest.raises(UsageError, match=r"a\.log:3: step 2 was already at line 2 with actor/pg_loss 0.25, now 0.75"):
        import_logs([write(tmp_path, "a.log", text)])


def test_a_step_that_goes_back_begins_another_run(tmp_path: Path) -> None:
    text = "".join(f"step:{s} - actor/pg_loss:{s}.5\n" for s in (1, 2, 3, 1, 2))
    found = import_logs([write(tmp_path, "a.log", text)])
    assert [list(t.steps) for t in found.runs.values()] == [[1, 2, 3], [1, 2]]
    assert any("step 1 follows step 3" in w for w in found.notes.warnings)


def test_a_map_points_a_canonical_name_elsewhere(tmp_path: Path) -> None:
    path = write(tmp_path, "a.log", VERL)
    assert import_logs([path], chosen={"loss": "actor/loss"}).runs["a.log"].column("loss") == [9.0, 9.0]
    with pytest.raises(UsageError, match="--map loss=actor/los: no such metric; there are"):
        import_logs([path], chosen={"loss": "actor/los"})


def warned(case: str, folder: Path) -> str:
    _, name, text, _ = CASES[case]
    return " ".join(import_logs([write(folder, name, text)]).notes.warnings)


def test_what_a_log_may_hide_is_said(tmp_path: Path) -> None:
    assert "logging_nan_inf_filter" in warned("trl", tmp_path)
    assert "the gradient norm is not finite in this run" in warned("trl", tmp_path)
    assert "logging_nan_inf_filter" not in warned("llamafactory", tmp_path)  # it shows a NaN, so the filter is off
    assert "a 0 of actor/pg_loss, loss is anything below 5e-05" in warned("mindspeed", tmp_path)
    assert "absolute value" in warned("mindspeed", tmp_path)
    assert "null stands for NaN or an infinity" in warned("verl-jsonl", tmp_path)
    assert "counted from 1" in warned("trl", tmp_path)
    assert "they were joined, numbers included" in warned("verl", tmp_path)


def test_what_was_left_out_is_counted(tmp_path: Path) -> None:
    _, name, text, _ = CASES["trl"]
    skipped = import_logs([write(tmp_path, name, text)]).notes.skipped
    assert skipped["validation rows"] == 1
    assert skipped["summary rows"] == 1
    assert skipped["ends of records that are cut short"] == 1
    assert skipped["lines without a record"] == 1  # the bar
    _, name, text, _ = CASES["torchtitan"]
    assert import_logs([write(tmp_path, name, text)]).notes.skipped["repeated records of a step"] == 1
