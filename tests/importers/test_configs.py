"""``harness diff``: what differs between two configurations, and which difference is suspicious."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from typer.testing import CliRunner

from harness.cli import app, arrange
from harness.configs.diff import default_of, defaults, same, setting_of, settings, shared
from harness.configs.read import read_config
from harness.errors import HarnessError
from harness.spec import RLSpec

VERL = {
    "actor_rollout_ref": {
        "actor": {"optim": {"lr": "1e-6"}, "grad_clip": 1.0, "use_kl_loss": False, "loss_agg_mode": "token-mean"},
        "rollout": {"temperature": 1.0, "n": 8, "log_prob_micro_batch_size_per_gpu": "${.n}"},
    },
    "data": {"max_response_length": 1024},
    "trainer": {"experiment_name": "a"},
}


def put(path: Path, data: Mapping[str, Any]) -> str:
    path.write_text(json.dumps(data) if path.suffix == ".json" else yaml.safe_dump(dict(data)))
    return str(path)


def run(*words: str) -> tuple[int, list[dict[str, Any]], str]:
    found = CliRunner().invoke(app, arrange(["diff", *words, "--json"])[0])
    if isinstance(found.exception, HarnessError):
        return found.exception.exit_code, [], str(found.exception)
    data = json.loads(found.stdout)
    assert data["schema"] == "harness/diff@1"
    return found.exit_code, data["differences"], " ".join(data["warnings"])


def test_the_most_reported_setting_stands_first(tmp_path: Path) -> None:
    other = json.loads(json.dumps(VERL))
    other["trainer"]["experiment_name"] = "b"
    other["actor_rollout_ref"]["actor"]["grad_clip"] = 0.5
    other["actor_rollout_ref"]["actor"]["loss_agg_mode"] = "seq-mean-token-sum"
    other["actor_rollout_ref"]["actor"]["optim"]["lr"] = 1e-6  # the same number, which YAML 1.1 reads as a string above
    code, found, _ = run(put(tmp_path / "a.yaml", VERL), put(tmp_path / "b.yaml", other))
    assert code == 1
    assert [d["key"] for d in found] == [
        "actor_rollout_ref.actor.loss_agg_mode",
        "actor_rollout_ref.actor.grad_clip",
        "trainer.experiment_name",
    ]
    assert [d["reports"] for d in found] == [15, 10, 0]
    assert found[1]["setting"] == "gradient clipping"
    assert (found[1]["a"], found[1]["b"], found[1]["origins"]) == (1.0, 0.5, ["file", "file"])
    assert run(put(tmp_path / "a.yaml", VERL), put(tmp_path / "c.yaml", VERL))[:2] == (0, [])


def test_a_default_that_changed_between_versions_is_a_difference(tmp_path: Path) -> None:
    plain = put(tmp_path / "ds.json", {"train_micro_batch_size_per_gpu": 1})
    set_ = put(tmp_path / "set.json", {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0})
    old, new = "deepspeed=0.19.2", "deepspeed=0.19.3"
    code, found, _ = run(plain, plain, "--version-a", old, "--version-b", new)
    assert code == 1
    assert {d["key"]: (d["a"], d["b"]) for d in found} == {
        "gradient_clipping": (0.0, 1.0),
        "bf16.check_grad_overflow": (False, True),
    }
    assert found[0]["origins"] == ["default of deepspeed 0.19.2", "default of deepspeed 0.19.3"]
    assert run(plain, plain, "--version-a", new, "--version-b", new)[:2] == (0, [])
    assert run(plain, set_, "--version-a", new, "--version-b", new)[:2] == (0, [])
    (only,) = run(plain, set_)[1]  # nobody said which version
    assert (only["key"], only["a"], only["b"]) == ("gradient_clipping", None, 1.0)
    assert only["origins"] == ["depends on the version of deepspeed", "file"]


def test_a_default_that_is_written_out_is_no_difference(tmp_path: Path) -> None:
    a = put(tmp_path / "a.yaml", {"learning_rate": 1e-4, "output_dir": "x"})
    b = put(tmp_path / "b.yaml", {"learning_rate": 1e-4, "output_dir": "x", "max_grad_norm": 1, "seed": 42})
    c = put(tmp_path / "c.yaml", {"learning_rate": 1e-4, "output_dir": "x", "max_grad_norm": 0.1, "seed": 42})
    assert run(a, b)[:2] == (0, [])
    assert [(d["key"], d["a"], d["b"]) for d in run(a, c)[1]] == [("max_grad_norm", 1.0, 0.1)]


def test_two_frameworks_are_compared_where_keys_mean_the_same(tmp_path: Path) -> None:
    trl = {
        "learning_rate": 1e-6,
        "num_generations": 16,
        "max_completion_length": 1024,
        "max_grad_norm": 0.2,
        "beta": 0.1,
    }
    code, found, said = run(put(tmp_path / "a.yaml", VERL), put(tmp_path / "b.yaml", trl))
    assert code == 1
    assert [(d["key"], d["a"], d["b"]) for d in found] == [
        ("actor_rollout_ref.actor.grad_clip | max_grad_norm", 1.0, 0.2),
        ("actor_rollout_ref.rollout.n | num_generations", 8, 16),
    ]
    assert "only keys known to mean the same are compared" in said


def test_references_of_omegaconf_are_followed(tmp_path: Path) -> None:
    references = {
        "a": "${oc.select:data.n,3}",
        "b": "${data.m}",
        "c": "${oc.select:x.y,1e-3}",
        "d": "${x.z}",
        "e": "${.a}",
    }
    data = {"actor_rollout_ref": {**references, "f": "${.f}"}, "data": {"n": 5, "m": "${.n}"}}
    put(tmp_path / "a.yaml", data)
    config = read_config(tmp_path / "a.yaml")
    assert config.kind == "verl"
    assert config.values["actor_rollout_ref.a"] == 5
    assert config.values["actor_rollout_ref.b"] == 5
    assert config.values["actor_rollout_ref.c"] == 1e-3
    assert config.values["actor_rollout_ref.d"] == "${x.z}"
    assert config.values["actor_rollout_ref.e"] == 5
    assert "x.z" in config.warnings[0]
    assert "refers to itself" in config.warnings[1]


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("zero_optimization.overlap_comm", "reduction and overlap of gradients"),
        ("gradient_clipping", "gradient clipping"),
        ("actor_rollout_ref.actor.clip_ratio_high", "clipping of the ratio"),
        ("actor_rollout_ref.actor.kl_loss_coef", "KL coefficient and estimator"),
        ("algorithm.rollout_correction.rollout_is", "correction of the rollout"),
        ("actor_rollout_ref.rollout.temperature", "sampling"),
        ("actor_rollout_ref.actor.optim.lr", "learning rate and schedule"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps", "learning rate and schedule"),
        ("zero_optimization.stage", "sharding"),
        ("norm_topk_prob", "routing"),
        ("router_aux_loss_coef", "auxiliary loss of the router"),
        ("routed_scaling_factor", "scale of the routed experts"),
        ("bf16.enabled", "training precision"),
        ("bf16.check_grad_overflow", "loss scale and overflow checks"),
        ("logging_nan_inf_filter", "what is logged"),
        ("actor_rollout_ref.rollout.enable_prefix_caching", "engine of the rollout"),
        ("trainer.experiment_name", None),
    ],
)
def test_keys_belong_to_settings(key: str, setting: str | None) -> None:
    found = setting_of(key)
    assert (found.name if found else None) == setting


def test_reports_are_those_of_the_survey() -> None:
    survey = Path(__file__).parents[2] / "experiments" / "failures.jsonl"
    reports = {d["name"]: len(d["reports"]) for d in map(json.loads, survey.read_text().splitlines())}
    data = yaml.safe_load((Path(__file__).parents[2] / "harness" / "configs" / "settings.yaml").read_text())
    for entry in data:
        assert entry["reports"] == sum(reports[f] for f in entry["failures"]), entry["name"]
    assert len(settings()) == len(data)


def installed(kind: str) -> tuple[str, dict[str, Any]]:
    if kind == "deepspeed":
        import deepspeed
        from deepspeed.runtime import constants
        from deepspeed.runtime.config import get_gradient_clipping
        from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        parts = {
            "bf16": DeepSpeedBF16Config(),
            "fp16": DeepSpeedFP16Config(),
            "zero_optimization": DeepSpeedZeroConfig(),
        }
        found = {f"{n}.{k}": v for n, part in parts.items() for k, v in part.model_dump().items()}
        found["gradient_clipping"] = get_gradient_clipping({})
        for key in ("prescale_gradients", "gradient_predivide_factor"):
            found[key] = getattr(constants, f"{key.upper()}_DEFAULT")
        return deepspeed.__version__, found
    import dataclasses

    import transformers
    import trl

    owner = transformers.TrainingArguments if kind == "hf" else trl.GRPOConfig
    version = transformers.__version__ if kind == "hf" else trl.__version__
    return version, {f.name: f.default for f in dataclasses.fields(owner)}


@pytest.mark.parametrize("kind", ["hf", "grpo", "deepspeed"])
@pytest.mark.filterwarnings("ignore")
def test_defaults_are_those_of_the_installed_release(kind: str) -> None:
    version, real = installed(kind)
    package = defaults()[kind]["package"]
    for key in defaults()[kind]["values"]:
        value, _ = default_of(kind, key, {package: str(Version(version))})
        assert same(value, getattr(real[key], "value", real[key])), key


def test_version_ranges_are_valid_and_do_not_overlap() -> None:
    for table in defaults().values():
        for key, entries in table["values"].items():
            ranges = [SpecifierSet(e["versions"]) for e in entries]
            for version in ("0.18.0", "0.19.2", "0.19.3", "1.16", "5.24.0", "9"):
                assert sum(r.contains(version) for r in ranges) <= 1, key


def test_keys_of_our_own_runs_exist() -> None:
    ours = {k.removeprefix("rl.") for keys in shared() for k in keys if k.startswith("rl.")}
    assert ours <= set(RLSpec.model_fields)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "[1, 2]", "is not a mapping"),
        ("a.json", "{", "is not JSON"),
        ("a.yaml", "a: [", "is not YAML"),
        ("training_args.bin", "x", "is a pickle, which may run code"),
    ],
)
def test_what_is_no_configuration_is_refused(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    code, _, message = run(str(tmp_path / name), str(tmp_path / name))
    assert code == 2
    assert said in message


def test_wrong_versions_are_a_sentence(tmp_path: Path) -> None:
    a = put(tmp_path / "a.yaml", VERL)
    assert "not of the form package=version" in run(a, a, "--version-a", "deepspeed")[2]
    assert "deepspeed" in run(a, a, "--version-a", "depspeed=1")[2]
    assert "is not a version" in run(a, a, "--version-a", "deepspeed=new")[2]


def test_a_table_is_printed_and_a_checkpoint_folder_is_its_config(tmp_path: Path) -> None:
    for name, k in (("a", 8), ("b", 4)):
        (tmp_path / name).mkdir()
        put(tmp_path / name / "config.json", {"model_type": "qwen3_moe", "num_experts_per_tok": k})
    found = CliRunner().invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert found.exit_code == 1
    assert "num_experts_per_tok" in found.stdout
