"""A small pair that is really trained and really pruned, and the command line as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.rl.originals import OriginalRecipe, ensure_original
from harness.spec import TaskSpec

RECIPE = OriginalRecipe(
    name="small",
    model_type="qwen3_moe",
    architecture={
        "hidden_size": 48,
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 64,
    },
    task=TaskSpec(mixture={"reverse": 1.0, "sort": 1.0}),
    steps=350,
    batch_size=64,
    lr=4e-3,
    warmup_steps=30,
    aux_coef=0.03,
)
PAIR = {
    "name": "small",
    "proxy": {"experts": 8, "calibration_sequences": 128},
    "task": {"mixture": {"reverse": 1.0, "sort": 1.0}},
    "rl": {
        "prompts_per_step": 4,
        "group_size": 4,
        "updates_per_rollout": 2,
        "micro_batches": 2,
        "temperature": 1.0,
        "rollout": {"attention": "eager"},
    },
    "deepspeed": {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0},
    "steps": 16,
    "onset": 5,
}

# Faults of a third party: a module that an entry point names.
PLUG_IN = '''
from harness.catalogue import fault
from harness.claims import NonFinite
from harness.seams import Stage


@fault(seam=Stage.CLIP, seen_in=["https://example.org/report"], expects=[NonFinite("grad_norm")])
def only_large(clean):
    """Breaks the norm of models with more than eight experts only.

    What breaks: the gradient norm.
    In the wild: nowhere; it is a test.
    Looks like: an infinite norm in one of two models.
    """

    def faulty(ctx, grads):
        large = ctx.trainer.model.config.num_experts > 8
        result = clean(ctx, grads)
        return result.with_(norm=float("inf")) if large else result

    return faulty
'''


@dataclass
class Harness:
    """The command line with its own home and its own place for plug-ins."""

    home: Path
    pair: Path
    plug_ins: Path

    def __call__(self, *words: str, check: int | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run ``harness`` and return what it printed."""
        result = subprocess.run(
            [sys.executable, "-c", "from harness.cli import main; main()", *words],
            capture_output=True,
            text=True,
            timeout=600,
            env=self.environment(**environment),
            check=False,
        )
        if check is not None:
            assert result.returncode == check, result.stdout + result.stderr
        return result

    def environment(self, **more: str) -> dict[str, str]:
        """Environment of the command."""
        path = os.pathsep.join([str(self.plug_ins), str(Path(__file__).parents[2])])
        return {**os.environ, "HARNESS_HOME": str(self.home), "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}

    def run(self, fault: str, *words: str, out: Path, check: int | None = None) -> dict[str, Any]:
        """Run a fault on the small pair and return the JSON."""
        argv = ["run", "--fault", fault, "--pair", str(self.pair), "--out", str(out), "--json", *words]
        result = self(*argv, check=check)
        data: dict[str, Any] = json.loads(result.stdout)
        return data


@pytest.fixture(scope="session")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    root = tmp_path_factory.mktemp("e2e")
    home = root / "home"
    original = ensure_original(RECIPE, home)
    pair = root / "small.yaml"
    pair.write_text(yaml.safe_dump({**PAIR, "original": {"folder": str(original)}}), encoding="utf-8")
    plug_ins = root / "plugins"
    (plug_ins / "third_party-1.0.dist-info").mkdir(parents=True)
    (plug_ins / "third_party_faults.py").write_text(PLUG_IN, encoding="utf-8")
    metadata = "Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n"
    (plug_ins / "third_party-1.0.dist-info" / "METADATA").write_text(metadata, encoding="utf-8")
    entry = "[harness.faults]\nthird_party = third_party_faults\n"
    (plug_ins / "third_party-1.0.dist-info" / "entry_points.txt").write_text(entry, encoding="utf-8")
    return Harness(home, pair, plug_ins)
