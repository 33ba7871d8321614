"""Runs a model over many batches with one decoder layer in memory at a time, by the model's own forward.

Every batch runs the model's forward in a thread of its own that stops where it enters a decoder layer. When all
batches have arrived, the layer is loaded, the batches pass through it one after the other, and it is dropped. So no
family needs code of its own, the peak is one layer plus the hidden states, and states beyond a budget wait on disk.
Only one thread runs at any moment, always in the same order.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxies.checkpoint import Checkpoint, CheckpointError
from proxies.weights import NotLayerwiseError, PartialModel, embeddings_of, layer_modules

if TYPE_CHECKING:
    import torch

Visit = Callable[[int, Any], AbstractContextManager[Any]]
# Environment that keeps oneDNN's caches small: they grow with every new number of tokens per expert. It has to be set
# before the process multiplies its first bf16 matrices.
CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "LRU_CACHE_CAPACITY": "1"}
SPILL_FROM = 65536  # bytes; smaller tensors are not worth a file


class _Stopped(BaseException):
    """Unwinds a batch's thread when the run is abandoned."""


class _Passage(threading.Thread):
    """One batch on its way through the model: runs when `advance` is called, until its next layer or its end."""

    def __init__(self, number: int, forward: Callable[[], Any]) -> None:
        super().__init__(daemon=True, name=f"batch {number}")
        self.number, self.waiting_at, self.result = number, -1, None
        self.states: tuple[Any, ...] = ()
        self._layer: Callable[[], Any] | None = None
        self._answer: Any = None
        self._forward = forward
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._abandoned = False

    def run(self) -> None:
        """Run the forward; called by `start`."""
        import torch

        self._go.acquire()
        try:
            if not self._abandoned:
                with torch.no_grad():
                    self.result = self._forward()
        except _Stopped:
            pass
        except BaseException as error:  # handed to whoever called `advance`
            self._error = error
        self.waiting_at = -1
        self.states = ()
        self._stopped.release()

    def arrive(self, layer: int, states: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Called inside the thread on entering a layer: wait there, and return what the layer gives."""
        self.waiting_at, self.states, self._layer = layer, states, run
        self._stopped.release()
        self._go.acquire()
        if self._abandoned:
            raise _Stopped
        answer, self._answer = self._answer, None
        return answer

    def advance(self) -> None:
        """Run until the next layer is reached or the forward has ended; raises what the forward raised.

        The layer at which the batch waits is run here, by the caller: the C library keeps freed memory by thread.
        """
        if self._layer is not None:
            run, self._layer, self.states = self._layer, None, ()
            self._answer = run()
            del run
        self._go.release()
        self._stopped.acquire()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """End the thread wherever it waits."""
        if self.is_alive():
            self._abandoned = True
            self._go.release()
            self.join()


class Layerwise:
    """A checkpoint folder that is run layer by layer.

    Attributes:
        model: The model; only what is needed at the moment is loaded.
        batch: Number of the batch that is running, for observers.
        layers: Number of decoder layers.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype | None = None,
        budget: int | None = None,
        scratch: Path | None = None,
    ) -> None:
        """Prepare to run; reads no weights.

        Args:
            checkpoint: The opened folder.
            dtype: Type to compute in; None for the checkpoint's own.
            budget: Bytes of hidden states to hold in memory; None for no limit.
            scratch: Folder for the states beyond the budget; None for the system's temporary folder.

        Raises:
            CheckpointError: transformers cannot build the model, or it does not say which its layers are.
        """
        self._parts = PartialModel(checkpoint, dtype)
        self.model = self._parts.model
        self._modules = layer_modules(self.model)
        self.layers = len(self._modules)
        self.batch = 0
        self._budget, self._scratch = budget, scratch
        self._landing: Landing | None = None
        self._leave: Callable[[int, Any, Any], None] = lambda _layer, _entered, _out: None

    def run(
        self,
        batches: Any,
        visit: Visit = lambda _layer, _module: nullcontext(),
        *,
        logits: Callable[[int, torch.Tensor], None] | None = None,
        progress: Callable[[int, int], None] = lambda _done, _all: None,
        landing: Landing | None = None,
        leave: Callable[[int, Any, Any], None] = lambda _layer, _entered, _out: None,
    ) -> None:
        """Pass all batches through the model.

        Args:
            batches: `(tokens [B, T] int64, attention_mask [B, T] or None)`.
            visit: Called with the index and the loaded module of each layer; the context manager that it returns is
                open while the batches pass.
            logits: Called with a batch's number and its logits [B, T, V]; None leaves the head out.
            progress: Called with (layers done, all layers).
            leave: Called with a layer's index, its first argument and what it returned, batch after batch (hooks on
                the layer itself would not be seen: the batches have entered it before it is visited).
            landing: Keeps the states after each layer, and has those to go on from if an earlier run was interrupted.
        """
        self._landing, self._leave = landing, leave
        passages = [_Passage(n, self._forward(tokens, mask, logits)) for n, (tokens, mask) in enumerate(batches)]
        outside = self._outside(logits is not None)
        with self._entrances(passages), _Spill(self._budget, self._scratch) as spill:
            try:
                self._parts.load(outside)
                if logits is not None:
                    self.model.tie_weights()
                for passage in passages:
                    passage.start()
                    self._advance(passage, spill)
                if logits is None:
                    self._drop(embeddings_of(self.model) & outside)
                for index in range(self._first, self.layers):
                    self._pass_layer(index, passages, spill, visit)
                    if landing is not None:
                        landing.reached(index + 1)
                    progress(index + 1, self.layers)
            except RuntimeError as error:
                if not re.search(r"\bmeta\b", str(error)):
                    raise
                kind = type(self.model).__name__
                raise NotLayerwiseError(f"{kind} reads a weight before its layer is run ({error}).") from error
            finally:
                for passage in passages:
                    passage.abandon()
                self._drop(outside)

    def _forward(self, tokens: torch.Tensor, mask: Any, logits: Callable[..., None] | None) -> Callable[[], Any]:
        def forward() -> None:
            module = self.model if logits is not None else self.model.base_model
            out = module(input_ids=tokens, attention_mask=mask, use_cache=False)
            if logits is not None:
                logits(self.batch, out.logits)

        return forward

    def _outside(self, head: bool) -> set[str]:
        """Names of what lies outside the layers; without the head if it is not asked for."""
        inside = tuple(f"{name}." for name, _ in self._modules.values())
        names = {name for name in self.model.state_dict() if not name.startswith(inside)}
        if head:
            return names
        prefix = f"{self.model.base_model_prefix}."
        return {name for name in names if name.startswith(prefix)}

    @contextmanager
    def _entrances(self, passages: list[_Passage]) -> Iterator[None]:
        """Make every layer's forward wait at its door."""
        for index, (_, module) in self._modules.items():
            module.forward = self._door(index, type(module).forward.__get__(module), passages)
        try:
            yield
        finally:
            for _, module in self._modules.values():
                del module.forward

    def _door(self, index: int, inner: Callable[..., Any], passages: list[_Passage]) -> Callable[..., Any]:
        def enter(*args: Any, **kwargs: Any) -> Any:
            if index < self._first:  # done by an earlier run
                assert self._landing is not None
                return self._landing.after(self.batch) if index == self._first - 1 else args[0]
            return passages[self.batch].arrive(
                index, (args, kwargs), partial(self._through, index, inner, args, kwargs)
            )

        return enter

    def _through(self, index: int, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        import torch

        with torch.no_grad():
            out = inner(*args, **kwargs)
        self._leave(index, args[0] if args else kwargs["hidden_states"], out)
        if self._landing is not None:
            self._landing.keep(index, self.batch, out)
        return out

    @property
    def _first(self) -> int:
        """The first layer that has to be run."""
        return self._landing.layer if self._landing is not None else 0

    def _advance(self, passage: _Passage, spill: _Spill) -> None:
        self.batch = passage.number
        spill.restore(passage.number)
        passage.advance()
        spill.keep(passage.number, passage.states)

    def _pass_layer(self, index: int, passages: list[_Passage], spill: _Spill, visit: Visit) -> None:
        name, module = self._modules[index]
        wrong = next((p.waiting_at for p in passages if p.waiting_at != index), index)
        if wrong != index:
            kind = type(self.model).__name__
            raise NotLayerwiseError(f"{kind} does not run its layers in order (layer {wrong} where {index} was due).")
        names = self._parts.names(f"{name}.")
        self._parts.load(names)
        try:
            with visit(index, module):
                for passage in passages:
                    self._advance(passage, spill)
        finally:
            self._drop(names)

    def _drop(self, names: set[str]) -> None:
        self._parts.drop(names)
        trim()


class Landing:
    """The hidden states after the last layer that all batches have passed, in a folder, so that a run can go on.

    Attributes:
        layer: Number of layers that are done.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        mark = folder / "reached.json"
        self.layer = int(json.loads(mark.read_text(encoding="utf-8"))["layers"]) if mark.exists() else 0

    def keep(self, layer: int, batch: int, out: Any) -> None:
        """Write the output of a layer for one batch: the hidden states [B, T, H]."""
        import torch
        from safetensors.torch import save_file

        if not isinstance(out, torch.Tensor):
            raise CheckpointError(f"layer {layer} returns a {type(out).__name__}; such a run cannot be resumed.")
        save_file({"states": out.contiguous()}, self._path(layer + 1, batch))

    def after(self, batch: int) -> torch.Tensor:
        """The kept states of one batch."""
        from safetensors.torch import load_file

        return load_file(self._path(self.layer, batch))["states"]

    def reached(self, layers: int) -> None:
        """Note that all batches have passed so many layers; older states go."""
        temporary = self._folder / "reached.tmp"
        temporary.write_text(json.dumps({"layers": layers}), encoding="utf-8")
        temporary.replace(self._folder / "reached.json")
        self.layer = layers
        for path in self._folder.glob("states-*.safetensors"):
            if not path.name.startswith(f"states-{layers}-"):
                path.unlink()

    def _path(self, layers: int, batch: int) -> Path:
        return self._folder / f"states-{layers}-{batch}.safetensors"


class _Spill(AbstractContextManager["_Spill"]):
    """Keeps the tensors of waiting batches within a budget; what is beyond it waits in files.

    The storage of a tensor is emptied in place, so that it does not matter who else holds the tensor.
    """

    def __init__(self, budget: int | None, scratch: Path | None) -> None:
        self._budget, self._scratch = budget, scratch
        self._held: dict[int, int] = {}
        self._files: dict[int, list[tuple[Path, Any, int]]] = {}
        self._folder: Path | None = None

    def keep(self, number: int, states: tuple[Any, ...]) -> None:
        """Account for the tensors of a batch that now waits; write them out if the budget is used up."""
        storages = _storages(states)
        size = sum(s.nbytes() for s in storages)
        if self._budget is None or sum(self._held.values()) + size <= self._budget:
            self._held[number] = size
            return
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix=".states-", dir=self._scratch))
        files = []
        for position, storage in enumerate(storages):
            path = self._folder / f"{number}-{position}"
            path.write_bytes(memoryview(_bytes_of(storage)))
            files.append((path, storage, storage.nbytes()))
            storage.resize_(0)
        self._files[number] = files

    def restore(self, number: int) -> None:
        """Bring a batch's tensors back into memory."""
        self._held.pop(number, None)
        for path, storage, size in self._files.pop(number, []):
            storage.resize_(size)
            with path.open("rb") as file:
                if file.readinto(memoryview(_bytes_of(storage))) != size:
                    raise CheckpointError(f"{path} has lost bytes while hidden states were parked in it.")
            path.unlink()

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _storages(value: Any) -> list[Any]:
    """The storages of all tensors in nested tuples, lists and dicts that are worth a file, each once."""
    import torch

    found: dict[int, Any] = {}

    def walk(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            if storage.nbytes() >= SPILL_FROM:
                found[storage._cdata] = storage
        elif isinstance(item, (tuple, list)):
            for part in item:
                walk(part)
        elif isinstance(item, dict):
            for part in item.values():
                walk(part)

    walk(value)
    return list(found.values())


def _bytes_of(storage: Any) -> Any:
    import torch

    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def trim() -> None:
    """Give freed memory back to the system, where the C library can (glibc keeps it otherwise)."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if release is not None:
        release(0)
