"""The fused Ascend operators in one registry: a reference of each in plain torch, and the real call on an NPU.

``table("reference")`` runs anywhere; ``table("fused")`` calls torch_npu and is unverified on hardware. ``install``
runs a whole model on either.
"""

from harness.rl.npu_ops.model import install, remove, used_by
from harness.rl.npu_ops.registry import Table, table

__all__ = ["Table", "install", "remove", "table", "used_by"]
