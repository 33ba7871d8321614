"""A torch_npu without an NPU: the real signatures over the reference operators, refusing what the device refuses.

It checks types, shapes and layouts, knows no fp64, and gives back results without a graph where torch_npu registers no
derivative, so that a caller who relies on one gets none.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from harness.rl.npu_ops import reference
from harness.seams import FUSED

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
WITHOUT_DERIVATIVE = ("npu_grouped_matmul", "npu_moe_gating_top_k_softmax")


def check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"fake torch_npu: {message}")


def floats(**tensors: torch.Tensor) -> None:
    for name, x in tensors.items():
        check(x.dtype in FLOATS, f"{name} must be one of {FLOATS}, got {x.dtype}")
    check(len({x.dtype for x in tensors.values()}) <= 1, f"{list(tensors)} must have one type")


def rms_norm(self: Any, gamma: Any, **_: Any) -> None:
    floats(self=self, gamma=gamma)
    check(gamma.shape == self.shape[-1:], f"gamma must have shape {self.shape[-1:]}, got {gamma.shape}")


def add_rms_norm(x1: Any, x2: Any, gamma: Any, **_: Any) -> None:
    floats(x1=x1, x2=x2, gamma=gamma)
    check(x1.shape == x2.shape and gamma.shape == x1.shape[-1:], "x1, x2 and gamma do not fit")


def swiglu(self: Any, dim: int, **_: Any) -> None:
    floats(self=self)
    check(self.is_contiguous() and self.shape[dim] % 2 == 0, "input must be contiguous with an even dimension")


def rotary_mul(input: Any, r1: Any, r2: Any, rotary_mode: str, **_: Any) -> None:
    floats(input=input, r1=r1, r2=r2)
    check(input.dim() == 4 and r1.dim() == 4 and r1.shape == r2.shape, "input, r1 and r2 must have four dimensions")
    check(input.shape[-1] == r1.shape[-1], "r1 must be as wide as the input")
    check(input.shape[-1] % 2 == 0 and input.shape[-1] < 896, "head dimension must be even and below 896")
    check(all(r in (1, x) for r, x in zip(r1.shape, input.shape, strict=True)), "r1 must be broadcastable")


def fusion_attention(
    query: Any, key: Any, value: Any, head_num: int, input_layout: str, atten_mask: Any, sparse_mode: int, **_: Any
) -> None:
    floats(query=query, key=key, value=value)
    rank = {"BSH": 3, "SBH": 3, "BSND": 4, "BNSD": 4, "TND": 3}[input_layout]
    check(all(x.dim() == rank for x in (query, key, value)), f"layout {input_layout} has {rank} dimensions")
    check(key.shape == value.shape, f"key and value must have one shape, got {key.shape} and {value.shape}")
    if input_layout in ("BNSD", "BSND"):
        heads, length = (1, 2) if input_layout == "BNSD" else (2, 1)
        check(query.shape[heads] == head_num, f"head_num {head_num} is not that of the query, {query.shape[heads]}")
        check(head_num % key.shape[heads] == 0, "heads of the query must be a multiple of those of the key")
        check(query.shape[-1] == key.shape[-1], "query and key must have one head dimension")
        if atten_mask is not None and sparse_mode in (0, 1):
            check(atten_mask.shape[-2:] == (query.shape[length], key.shape[length]), "mask does not fit the scores")
            check(
                atten_mask.dim() in (2, 4) and (atten_mask.dim() == 2 or atten_mask.shape[0] in (1, query.shape[0])),
                "mask must be [S, S], [B, 1, S, S] or [B, N, S, S]",
            )
    if atten_mask is not None:
        check(atten_mask.dtype in (torch.bool, torch.uint8), f"mask must be bool or uint8, got {atten_mask.dtype}")


def grouped_matmul(x: Any, weight: Any, group_list: Any, group_list_type: int, group_type: Any, **_: Any) -> None:
    check(isinstance(x, list) and isinstance(weight, list), "x and weight must be lists of tensors")
    floats(x=x[0], weight=weight[0])
    check(x[0].dim() == 2 and weight[0].dim() == (3 if group_type == 0 else 2), "x or weight has the wrong rank")
    check(x[0].shape[1] == weight[0].shape[-2], f"x {x[0].shape} and weight {weight[0].shape} do not fit")
    check(group_list.dtype == torch.int64 and group_list.dim() == 1, "group_list must be a vector of int64")
    rows = x[0].shape[1] if group_type == 2 else x[0].shape[0]
    if group_list_type == 1:
        check(int(group_list.sum()) <= rows, "counts add up to more than the rows")
    else:
        check(bool((group_list.diff() >= 0).all()), "cumulative ends must not decrease")
        check(int(group_list[-1]) <= rows, "the last end lies beyond the rows")


def token_permute(tokens: Any, indices: Any, **_: Any) -> None:
    floats(tokens=tokens)
    check(tokens.dim() == 2 and indices.shape[0] == tokens.shape[0], "tokens and indices do not fit")
    check(indices.dtype in (torch.int32, torch.int64), f"indices must be integers, got {indices.dtype}")


def token_unpermute(permuted_tokens: Any, sorted_indices: Any, probs: Any, **_: Any) -> None:
    floats(permuted_tokens=permuted_tokens)
    check(sorted_indices.dtype == torch.int32, f"sorted_indices must be int32, got {sorted_indices.dtype}")
    check(sorted_indices.shape == permuted_tokens.shape[:1], "sorted_indices and tokens do not fit")
    if probs is not None:
        floats(probs=probs)
        check(probs.dim() == 2 and probs.numel() == sorted_indices.numel(), "probs and sorted_indices do not fit")


def gating_top_k_softmax(x: Any, finished: Any, k: int, **_: Any) -> None:
    floats(x=x)
    check(x.dim() in (2, 3) and 0 < k <= x.shape[-1] <= 1024, f"k = {k} and x {x.shape} do not fit")
    check(finished is None or finished.dtype == torch.bool, "finished must be bool")


def gating_top_k(x: Any, k: int, bias: Any, k_group: int, group_count: int, **_: Any) -> None:
    floats(x=x, **({} if bias is None else {"bias": bias}))
    check(x.dim() == 2 and x.shape[-1] % group_count == 0 and k_group <= group_count, "groups do not fit")
    check(k <= x.shape[-1] // group_count * k_group, f"k = {k} is more than the experts of {k_group} groups")


CHECKS: dict[str, Callable[..., None]] = {
    "npu_rms_norm": rms_norm,
    "npu_add_rms_norm": add_rms_norm,
    "npu_swiglu": swiglu,
    "npu_rotary_mul": rotary_mul,
    "npu_fusion_attention": fusion_attention,
    "npu_grouped_matmul": grouped_matmul,
    "npu_moe_token_permute": token_permute,
    "npu_moe_token_unpermute": token_unpermute,
    "npu_moe_gating_top_k_softmax": gating_top_k_softmax,
    "npu_moe_gating_top_k": gating_top_k,
}


def _operator(name: str, calls: list[str]) -> Callable[..., Any]:
    kernel = getattr(reference, name)
    signature = inspect.signature(kernel)

    def operator(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)  # an argument that the operator does not have is a TypeError
        bound.apply_defaults()
        CHECKS[name](**bound.arguments)
        calls.append(name)
        with torch.set_grad_enabled(torch.is_grad_enabled() and name not in WITHOUT_DERIVATIVE):
            return kernel(*args, **kwargs)

    return operator


def make(calls: list[str], devices: int = 1) -> types.ModuleType:
    """Return the module, to be put into ``sys.modules``; every operator call is noted by name."""
    module: Any = types.ModuleType("torch_npu")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    module.__version__ = "0.fake"
    module.npu = types.SimpleNamespace(device_count=lambda: devices)
    for name in FUSED:
        setattr(module, name, _operator(name, calls))
    return module
