"""Devices: what there is on this machine. The only file that imports torch_npu, and only when asked for an NPU."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from harness.errors import MachineError


@dataclass(frozen=True)
class Device:
    """One kind of device.

    Attributes:
        kind: ``cpu``, ``cuda`` or ``npu``.
        usable: Whether tensors can be put on it now.
        detail: What it is, or why it cannot be used.
    """

    kind: str
    usable: bool
    detail: str


def devices() -> list[Device]:
    """Return every kind of device, usable or not. Imports torch."""
    import torch

    found = [Device("cpu", True, f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")]
    if torch.cuda.is_available():
        found.append(Device("cuda", True, f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"))
    else:
        found.append(Device("cuda", False, "no CUDA device, or a build of torch without CUDA"))
    found.append(npu())
    return found


def npu() -> Device:
    """Return the state of the Ascend NPU without breaking torch where CANN is missing."""
    if importlib.util.find_spec("torch_npu") is None:
        return Device("npu", False, "torch_npu is not installed; on an Ascend machine install the extra [npu]")
    try:
        import torch_npu
    except (ImportError, OSError, RuntimeError) as e:
        return Device("npu", False, f"torch_npu is installed but cannot be loaded; is CANN's set_env.sh sourced? ({e})")
    count = torch_npu.npu.device_count()
    return Device("npu", count > 0, f"{count} devices, torch_npu {torch_npu.__version__}")


def torch_npu() -> Any:
    """Return the module torch_npu, for its operators.

    Raises:
        MachineError: If there is no usable NPU.
    """
    state = npu()
    if not state.usable:
        raise MachineError(f"the fused operators need an Ascend NPU: {state.detail}; choose ops: reference")
    import torch_npu

    return torch_npu
