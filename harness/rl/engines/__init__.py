"""The training side: what happens from the scaled loss to the changed weights."""

from __future__ import annotations

from collections.abc import Mapping

from harness.rl.stages import Stage

# Stages that an engine does not leave open to faults, since they happen inside its own step.
OWNED: Mapping[str, tuple[Stage, ...]] = {
    "torch": (),
    "deepspeed": (Stage.REDUCE, Stage.UNSCALE, Stage.CLIP, Stage.STEP),
}
