"""A real DeepSpeed engine on the CPU: ZeRO 0 to 3 with the configuration's own JSON, and torch's AdamW inside.

DeepSpeed reduces, unscales, clips and steps in one call, so those stages are its own: they pass on the gradients for
measurement, and changing them there changes nothing. What it does with a gradient that is not finite differs: ZeRO 0 in
fp32 takes the step, everything else skips it and reports an infinite norm; ``skip_nonfinite`` of the RL settings and
``max_grad_norm`` are not consulted.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from harness.errors import MachineError, UsageError
from harness.rl.engines import OWNED
from harness.rl.engines.torch_engine import global_norm
from harness.rl.stages import Batch, Grads, Loss, Stage, StageFn, Update

if TYPE_CHECKING:
    from harness.rl.context import Context
    from harness.rl.policy import Policy
    from harness.spec import RLSpec

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets
NAME = "deepspeed"


def settings(config: Mapping[str, Any], rl: RLSpec, world: int) -> dict[str, Any]:
    """Complete a DeepSpeed configuration with what the RL settings decide; nothing else gets a default here.

    Args:
        config: The configuration's JSON.
        rl: RL settings.
        world: Number of processes.

    Returns:
        The configuration that DeepSpeed is given.

    Raises:
        UsageError: If the two contradict each other.
    """
    for key in ("zero_optimization", "bf16", "fp16"):
        if not isinstance(config.get(key, {}), Mapping):
            raise UsageError(f"deepspeed.{key} must be a mapping of settings, got {config[key]!r}")
    limit = config.get("gradient_clipping", 0.0)
    if not isinstance(limit, (int, float)) or not 0 <= limit < math.inf:
        raise UsageError(f"deepspeed.gradient_clipping must be a finite number from 0 (no clipping) up, got {limit!r}")
    sequences = rl.prompts_per_step * rl.group_size // (rl.updates_per_rollout * rl.micro_batches)
    sizes = {
        "train_micro_batch_size_per_gpu": sequences,
        "gradient_accumulation_steps": rl.micro_batches,
        "train_batch_size": sequences * rl.micro_batches * world,
    }
    for key, needed in sizes.items():
        if config.get(key, needed) != needed:
            raise UsageError(
                f"deepspeed.{key} is {config[key]!r}, but the RL settings make it {needed} ({sequences} sequences per "
                f"micro-batch, {rl.micro_batches} micro-batches per update, {world} processes); drop the key or change "
                "prompts_per_step, group_size, updates_per_rollout or micro_batches"
            )
    if "optimizer" in config:
        raise UsageError("deepspeed.optimizer is not used: the optimiser is AdamW with the RL settings; drop the key")
    if rl.loss_scale != 1.0:
        raise UsageError(f"rl.loss_scale {rl.loss_scale:g} is not used by engine deepspeed; set deepspeed.fp16 instead")
    return {
        **config,
        **{key: config.get(key, needed) for key, needed in sizes.items()},
        **_precision(config, rl),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _precision(config: Mapping[str, Any], rl: RLSpec) -> dict[str, Any]:
    """Switch on DeepSpeed's mode for the trainer's precision, keeping that section's other settings."""
    dtype, changes = rl.trainer.dtype, {}
    for section, precision in (("bf16", "bfloat16"), ("fp16", "float16")):
        given = config.get(section, {})
        if given.get("enabled", dtype == precision) != (dtype == precision):
            raise UsageError(
                f"deepspeed.{section}.enabled is {given['enabled']}, but rl.trainer.dtype is {dtype}; make them agree"
            )
        if dtype == precision:
            changes[section] = {**given, "enabled": True}
    return changes


def _join() -> None:
    """Start gloo on the loopback interface: alone in this process, or with the others under torchrun."""
    import deepspeed

    log = logging.getLogger("DeepSpeed")
    log.setLevel(logging.ERROR)  # its warnings are about settings that are meant here
    for handler in log.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    warnings.filterwarnings("ignore", r".*(all_gather_into|reduce_scatter)_tensor` is deprecated", FutureWarning)
    # Shared-memory collectives would be compiled here for a minute. Without them DeepSpeed falls back to gloo.
    deepspeed.ops.__compatible_ops__ = {}
    if torch.distributed.is_initialized():
        return
    if all(name in os.environ for name in LAUNCHED):
        torch.distributed.init_process_group("gloo")
    else:
        os.environ["LOCAL_RANK"] = "0"  # DeepSpeed insists on this one
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # no port is opened for it
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    deepspeed.init_distributed("gloo", verbose=False)
    atexit.register(_leave)


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _reason(error: Exception) -> str:
    """Put a reason of several lines on one."""
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors())
    return " ".join(str(error).split())


class DeepSpeedEngine:
    """Hands the trainer to DeepSpeed.

    Attributes:
        owned: Stages that this engine does not leave open to faults, with the engine's name.
    """

    owned: Mapping[Stage, str] = dict.fromkeys(OWNED[NAME], NAME)

    def __init__(self, trainer: Policy, rl: RLSpec, config: Mapping[str, Any]) -> None:
        """Initialise DeepSpeed.

        Args:
            trainer: Weights to train; its forward pass and its access to whole weights are replaced.
            rl: RL settings.
            config: DeepSpeed's JSON.

        Raises:
            UsageError: If the configuration contradicts the RL settings, or DeepSpeed refuses it.
            MachineError: If DeepSpeed is not installed.
        """
        os.environ["DS_ACCELERATOR"] = "cpu"
        try:
            import deepspeed
        except ImportError as e:
            raise MachineError(f"engine deepspeed needs the package deepspeed: {e}") from e
        _join()
        complete = settings(config, rl, torch.distributed.get_world_size())
        self._named = dict(trainer.model.named_parameters())
        optimizer = torch.optim.AdamW(
            self._named.values(), lr=rl.lr, betas=rl.betas, eps=rl.eps, weight_decay=rl.weight_decay, fused=True
        )
        for name, _ in trainer.modules("experts"):
            # ZeRO 3 fetches a mixture-of-experts block as one unit: which of its experts run depends on the tokens
            deepspeed.utils.set_z3_leaf_module(trainer.model.get_submodule(name.rpartition(".")[0]), True)
        try:
            self._engine, *_ = deepspeed.initialize(model=trainer.model, optimizer=optimizer, config=complete)
        except (ValueError, TypeError, AssertionError, RuntimeError) as e:
            raise UsageError(f"DeepSpeed {deepspeed.__version__} refuses its configuration: {_reason(e)}") from e
        trainer.forward = self._engine
        trainer.whole = self._whole

    def stages(self) -> dict[Stage, StageFn]:
        """Return the stages that this engine implements."""
        return {
            Stage.SCALE: self.scale,
            Stage.BACKWARD: self.backward,
            Stage.REDUCE: self.reduce,
            Stage.UNSCALE: self.unscale,
            Stage.CLIP: self.clip,
            Stage.STEP: self.step,
        }

    def effective(self) -> dict[str, Any]:
        """Return the settings that are in force, read back from the engine."""
        engine = self._engine
        group = engine.optimizer.param_groups[0]
        return {
            "zero_stage": int(engine.zero_optimization_stage()),
            "gradient_clipping": float(engine.gradient_clipping()),
            "gradient_accumulation_steps": int(engine.gradient_accumulation_steps()),
            "train_micro_batch_size_per_gpu": int(engine.train_micro_batch_size_per_gpu()),
            "train_batch_size": int(engine.train_batch_size()),
            "world_size": int(engine.world_size),
            "dtype": str(engine.get_data_types()[0]).removeprefix("torch."),
            "grad_accum_dtype": str(engine.get_data_types()[1]).removeprefix("torch."),
            "communication_data_type": str(engine.communication_data_type).removeprefix("torch."),
            "loss_scale": float(getattr(engine.optimizer, "loss_scale", 1.0)),
            **{k: group[k] for k in ("lr", "betas", "eps", "weight_decay")},
        }

    @contextmanager
    def _whole(self, *, write: bool = False) -> Iterator[None]:
        """Gather partitioned weights; after a change hand them to the fp32 master copies that ZeRO steps from."""
        import deepspeed

        parameters = list(self._named.values())
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if write else None):
            yield
            if write:
                for p in parameters:
                    deepspeed.utils.safe_set_full_fp32_param(p, p.detach().float())

    def scale(self, ctx: Context, loss: Loss) -> torch.Tensor:
        """Leave the loss as it is: DeepSpeed scales it, where it scales at all, in ``backward``."""
        return loss.value

    def backward(self, ctx: Context, scaled: torch.Tensor) -> None:
        """Accumulate gradients, and reduce them after the last micro-batch.

        The loss is already this micro-batch's share of the mini-batch's, so DeepSpeed's division by
        ``gradient_accumulation_steps`` is switched off.
        """
        self._engine.backward(scaled, scale_wrt_gas=False)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()  # takes no step before the boundary, and counts the micro-batch

    def reduce(self, ctx: Context, mini: Batch) -> Grads:
        """Read the reduced gradients, for measurement; none in fp16, where each ZeRO stage scales them differently."""
        from deepspeed.utils import safe_get_full_grad

        if self._engine.fp16_enabled():
            return Grads({})
        read = {name: safe_get_full_grad(p) for name, p in self._named.items()}
        return Grads({name: grad for name, grad in read.items() if grad is not None})

    def unscale(self, ctx: Context, grads: Grads) -> Grads:
        """Leave it to the step."""
        return grads

    def clip(self, ctx: Context, grads: Grads) -> Grads:
        """Leave it to the step; measure the norm where DeepSpeed will not (ZeRO 0 in fp32)."""
        engine = self._engine
        if engine.zero_optimization() or engine.bfloat16_enabled() or engine.fp16_enabled():
            return grads
        return grads.with_(norm=float(global_norm(grads.named)))

    def step(self, ctx: Context, grads: Grads) -> Update:
        """Unscale, clip and step; the norm is the one that DeepSpeed reports (infinite if it skipped)."""
        engine = self._engine
        lr = float(engine.get_lr()[0])
        engine.step()
        norm = engine.get_global_grad_norm()
        return Update(skipped=not engine.was_step_applied(), lr=lr, norm=None if norm is None else float(norm))
