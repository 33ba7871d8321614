"""Loads parts of a checkpoint folder into a model that lives on torch's meta device, and drops them again.

Names and layouts on disk and in memory differ in transformers 5; its own conversion tables
(`transformers.conversion_mapping`) join the two. The two operations that fuse per-expert tensors are carried out in
place, so that loading a layer needs no more memory than the layer; the others are left to transformers.
"""

from __future__ import annotations

import copy
import math
import mmap
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proxies.checkpoint import Checkpoint, CheckpointError, TensorInfo, nonfinite_in, read_into

if TYPE_CHECKING:
    import torch

SCALE = "_scale_inv"  # suffix of the inverse block scales of fp8 weights, as DeepSeek-V3 ships them

_OWN_PAGES = 1 << 20  # bytes from which a tensor gets pages of its own


class NotLayerwiseError(CheckpointError):
    """The model cannot be run with one layer in memory; the whole of it could be."""


@dataclass
class _Group:
    """Tensors on disk that together make one or more tensors in memory; `converter` None where only the name differs.

    `sources` maps the converter's source pattern to the tensors that matched it, in order.
    """

    target: str
    converter: Any = None
    sources: dict[str, list[TensorInfo]] = field(default_factory=dict)


class PartialModel:
    """A model on the meta device whose parts are loaded from a checkpoint folder on demand.

    Attributes:
        model: The causal language model; parts that are not loaded are meta tensors.
        dtype: Type of its weights.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> None:
        """Build the model on the meta device.

        Args:
            checkpoint: The opened folder.
            dtype: Type of the weights in memory; None for the one config.json names, else that of the tensors.

        Raises:
            CheckpointError: transformers cannot build the architecture.
        """
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        self._checkpoint = checkpoint
        try:
            config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True, trust_remote_code=False)
            self.dtype = dtype or _dtype(config, checkpoint)
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(config, dtype=self.dtype, trust_remote_code=False).eval()
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            text = " ".join(str(error).split())
            raise CheckpointError(f"{checkpoint.folder}: transformers cannot build this model: {text}") from error
        self.model.requires_grad_(False)
        self._meta = {**self.model.state_dict(), **dict(self.model.named_buffers())}
        self._groups = self._match()
        self._fp32 = [*self.model._keep_in_fp32_modules_strict] if self.dtype.itemsize == 2 else []
        self._make_buffers()

    def _match(self) -> dict[str, _Group]:
        """Group the tensors on disk by the tensor in memory that they make."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        mapping = get_model_conversion_mapping(self.model)
        renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        converters = [m for m in mapping if isinstance(m, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        state = self.model.state_dict()
        groups: dict[str, _Group] = {}
        for name in sorted(self._checkpoint.tensors, key=dot_natural_key):
            if name.endswith(SCALE) and name.removesuffix(SCALE) in self._checkpoint.tensors:
                continue  # read together with its weight
            target, pattern = rename_source_key(name, renamings, converters, self.model.base_model_prefix, state)
            if pattern is None and target not in state:
                continue  # a spare tensor
            group = groups.setdefault(target, _Group(target, by_pattern.get(pattern)))
            group.sources.setdefault(pattern or target, []).append(self._checkpoint.tensors[name])
        return groups

    def _make_buffers(self) -> None:
        """Compute the buffers that no checkpoint holds, such as rotary frequencies; weights stay on the meta device."""
        import torch

        for name, buffer in self.model.named_non_persistent_buffers():
            self._put(name, torch.empty_like(buffer, device="cpu"))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            self.model.initialize_weights()

    def names(self, prefix: str) -> set[str]:
        """Names in memory of the parameters and persistent buffers below a module, from its name and a dot."""
        return {name for name in self.model.state_dict() if name.startswith(prefix)}

    def load(self, names: Iterable[str]) -> None:
        """Load tensors by their names in memory.

        Raises:
            CheckpointError: a tensor is missing on disk, has another shape than the model's, or is not finite.
        """
        wanted = set(names)
        for group in self._groups.values():
            if group.target in wanted:
                for name, value in self._made(group).items():
                    self._put(name, value)
                    wanted.discard(name)
        missing = sorted(wanted - set(self.model.all_tied_weights_keys))
        if missing:
            raise CheckpointError(f"{self._checkpoint.folder} lacks what the model's tensor {missing[0]} is made of.")

    def drop(self, names: Iterable[str]) -> None:
        """Put tensors back on the meta device, which frees their memory."""
        for name in names:
            self._put(name, self._meta[name])

    def _made(self, group: _Group) -> dict[str, torch.Tensor]:
        """The tensors in memory that a group makes, by name."""
        if group.converter is None:
            (infos,) = group.sources.values()
            return {group.target: self._checked(group.target, self._read(infos[0], self._type(group.target)), infos)}
        if group.target in self._meta and _fuses_experts(group.converter):
            return {group.target: self._fused(group)}
        converter = copy.deepcopy(group.converter)
        for pattern, infos in group.sources.items():
            for info in infos:
                tensor = self._read(info, self._type(group.target))
                converter.add_tensor(group.target, info.name, pattern, lambda t=tensor: t)
        made = converter.convert(group.target, model=self.model, config=self.model.config)
        every = [info for infos in group.sources.values() for info in infos]
        single = {n: v[0] if isinstance(v, list) else v for n, v in made.items()}
        return {name: self._checked(name, value, every) for name, value in single.items()}

    def _fused(self, group: _Group) -> torch.Tensor:
        """Stack experts along the first dimension and their parts along the second, each read into its place."""
        reference = self._meta[group.target]
        out = empty(reference.shape, self._type(group.target))
        start = 0
        for pattern in group.converter.source_patterns:
            infos = group.sources.get(pattern, [])
            rows = infos[0].shape[0] if infos else 0
            for expert, info in enumerate(infos):
                place = out[expert : expert + 1, start : start + rows]
                if place.shape[1:] != info.shape or len(infos) != len(out):
                    what = f"{info.name} {list(info.shape)}, one of {len(infos)}"
                    raise CheckpointError(f"{info.file}: tensor {what}, does not fit {group.target} {list(out.shape)}.")
                self._read_to(info, place[0])
            start += rows
        if start != out.shape[1]:
            where = f"{self._checkpoint.folder}: the parts of {group.target}"
            raise CheckpointError(f"{where} have {start} rows together, the model needs {out.shape[1]}.")
        return out

    def _checked(self, name: str, value: torch.Tensor, infos: list[TensorInfo]) -> torch.Tensor:
        reference = self._meta.get(name)
        if reference is None or reference.shape != value.shape:
            needs = "does not have" if reference is None else f"needs as {list(reference.shape)}"
            raise CheckpointError(f"{infos[0].file}: {name} is {list(value.shape)}, which the model {needs}.")
        return value

    def _type(self, name: str) -> torch.dtype:
        import torch

        parts = name.split(".")
        if any(part in parts for part in self._fp32):
            return torch.float32
        return self._meta[name].dtype if name in self._meta else self.dtype

    def _read(self, info: TensorInfo, dtype: torch.dtype) -> torch.Tensor:
        out = empty(info.shape, dtype)
        self._read_to(info, out)
        return out

    def _read_to(self, info: TensorInfo, out: torch.Tensor) -> None:
        """Read one tensor into contiguous memory, converting its type and undoing fp8 block scales."""
        import torch

        stored = _torch_dtype(info)
        scale = self._checkpoint.tensors.get(info.name + SCALE)
        straight = stored == out.dtype and scale is None
        raw = out if straight else empty(info.shape, stored)
        memory = raw.reshape(-1).view(torch.uint8).numpy()
        read_into(info, memory)
        bad = nonfinite_in(memory, info.dtype)
        if bad:
            raise CheckpointError(f"{info.file}: tensor {info.name} holds {bad} values that are NaN or infinite.")
        if scale is not None:
            out.copy_(_scaled(self._checkpoint, info, raw))
        elif not straight:
            out.copy_(raw)

    def _put(self, name: str, value: torch.Tensor) -> None:
        import torch

        path, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(path)
        if leaf in module._parameters:
            module._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[leaf] = value


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory that goes back to the system when it is freed, however the C library keeps its heap."""
    import torch

    size = math.prod(shape) * dtype.itemsize
    if size < _OWN_PAGES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).view(dtype).view(shape)


def read_tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """One tensor of a checkpoint in its own type."""
    import torch

    info = checkpoint.tensors[name]
    out = empty(info.shape, _torch_dtype(info))
    read_into(info, out.reshape(-1).view(torch.uint8).numpy())
    return out


def read_values(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """One tensor of a checkpoint as numbers: fp8 weights are multiplied by their block scales."""
    raw = read_tensor(checkpoint, name)
    return _scaled(checkpoint, checkpoint.tensors[name], raw) if name + SCALE in checkpoint.tensors else raw


def _scaled(checkpoint: Checkpoint, info: TensorInfo, raw: torch.Tensor) -> torch.Tensor:
    scale = checkpoint.tensors[info.name + SCALE]
    settings = checkpoint.config.get("quantization_config") or {}
    block = int((settings.get("weight_block_size") or [128])[0])
    needed = tuple(-(-n // block) for n in info.shape)
    if scale.shape != needed:
        what = f"{scale.name} is {list(scale.shape)}, blocks of {block} need {list(needed)}"
        raise CheckpointError(f"{scale.file}: tensor {what}.")
    return dequantised(raw, read_tensor(checkpoint, scale.name).float(), block)


def dequantised(weight: torch.Tensor, scale: torch.Tensor, block: int = 128) -> torch.Tensor:
    """Undo fp8 block scaling: every block of the matrix times its inverse scale, in float32.

    Args:
        weight: [M, N] float8.
        scale: [ceil(M / block), ceil(N / block)] float32.
        block: rows and columns of a block; 128 in DeepSeek-V3 (arXiv 2412.19437, section 3.3.2).
    """
    rows = scale.repeat_interleave(block, 0)[: weight.shape[0]]
    return weight.float() * rows.repeat_interleave(block, 1)[:, : weight.shape[1]]


def _fuses_experts(converter: Any) -> bool:
    """Say whether a converter only stacks experts, or stacks them and joins their parts along the rows."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    kinds = [(type(op), op.dim) for op in converter.operations if hasattr(op, "dim")]
    if len(kinds) != len(converter.operations) or len(converter.target_patterns) != 1:
        return False
    stacks = kinds[:1] == [(MergeModulelist, 0)]
    return stacks and (kinds[1:] == [(Concatenate, 1)] or (len(kinds) == 1 and len(converter.source_patterns) == 1))


def _torch_dtype(info: TensorInfo) -> torch.dtype:
    import torch

    names = {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
        "BOOL": torch.bool,
    }  # fmt: skip
    if info.dtype not in names:
        raise CheckpointError(
            f"{info.file}: tensor {info.name} has the dtype {info.dtype}, which cannot be computed with."
        )
    return names[info.dtype]


def _dtype(config: Any, checkpoint: Checkpoint) -> torch.dtype:
    """Type that config.json names, else that of the first tensor that has one of the working types."""
    import torch

    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    working = ("F32", "BF16", "F16")
    return next((_torch_dtype(i) for i in checkpoint.tensors.values() if i.dtype in working), torch.float32)


def layer_modules(model: Any) -> dict[int, tuple[str, Any]]:
    """The decoder layers of a model, by index: name and module, in the order in which they run.

    Raises:
        NotLayerwiseError: the model does not say which modules its layers are.
    """
    classes: Mapping[str, Any] = dict.fromkeys(model._no_split_modules or ())
    found: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        match = re.fullmatch(r".*\.(\d+)", name)
        if match and type(module).__name__ in classes:
            found[int(match[1])] = (name, module)
    if not found or sorted(found) != list(range(len(found))):
        raise NotLayerwiseError(f"{type(model).__name__} does not say which of its modules are its decoder layers.")
    return dict(sorted(found.items()))


def embeddings_of(model: Any) -> set[str]:
    """Names of the parameters of the input embedding."""
    module = model.get_input_embeddings()
    prefix = next(name for name, m in model.named_modules() if m is module)
    return {f"{prefix}.{name}" for name, _ in module.named_parameters()}
