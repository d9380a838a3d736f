"""Records every allocation and release of a program that runs on fake tensors.

A dispatch mode above the fake mode sees each operator's outputs; a storage that was not seen
before is an allocation, and a weak reference's callback is its release.

Two traps of tracing are mended elsewhere: what the engine does in place (`engine.py`), and code that
asks a tensor for its value (`values.py`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tuner.errors import Untraceable
from tuner.memory.engine import as_the_engine_runs, references_of_engine, storage_key
from tuner.memory.rules import HOST, KernelCall, KernelMemory, KernelModel
from tuner.memory.sparse import parts_of, sparse_answer
from tuner.memory.values import Values, user_place

_aten = torch.ops.aten
_device_of = torch.ops.prim.device.default
_DATA_DEPENDENT = {
    _aten.nonzero.default: "a boolean mask or nonzero()",
    _aten.masked_select.default: "masked_select()",
    _aten._unique2.default: "unique()",
    _aten.repeat_interleave.Tensor: "repeat_interleave() with a tensor of counts",
}


@dataclass
class Block:
    """One allocation: its size and who made it. `category` is settled as the step unfolds."""

    bytes: int
    category: str
    module: str
    phase: str
    step: int
    operator: str


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that turns a program into allocation events.

    Attributes:
        blocks: Every allocation, in order.
        events: `i` for the allocation of `blocks[i]`, `~i` for its release, in time order.
        live: Indices of the blocks that are alive, by storage.
        phase: `setup`, `inputs`, `forward`, `backward`, `optimizer`, `eval`; set by the tracer,
            which calls it `forward` for all of a training step: backward is noticed here.
        notes: Assumptions made on the way, a sentence each.
        rules: Names of the rules that applied.
        values: Answers code that asks a tensor for its value.
        stepped: The optimizers that stepped, by id.

    Args:
        kernels: Knows what kernels allocate inside themselves, or None.
        branch: The answer to a truth value that nobody knows.
        device: The device type; only beside a GPU is host memory a place of its own.
    """

    def __init__(self, kernels: KernelModel | None, *, branch: bool = True, device: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks: list[Block] = []
        self.events: list[int] = []
        self.live: dict[int, int] = {}
        self.phase = "setup"
        self.step = 0
        self.notes: dict[str, None] = {}
        self.rules: dict[str, None] = {}
        self.stepped: set[int] = set()
        self.module_names: dict[int, str] = {}
        self._module_stack: list[str] = []
        self._module_of_node: dict[int, str] = {}
        self._references: list[weakref.ref[Any]] = []  # a reference must live to call back
        self.values = Values(self.notes, branch=branch)
        self._kernels = kernels
        self._has_host = device != "cpu"
        self._kept: set[str] = set()
        references_of_engine()  # not below this mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _device_of and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two calls in three ask for this; the long way costs 50 µs
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:
            return self.values.of(args[0], in_step=self._in_step)
        if func in _DATA_DEPENDENT:
            raise Untraceable(f"{_DATA_DEPENDENT[func]} makes a shape that depends on data{user_place()}")
        node = torch._C._current_autograd_node()
        if not kwargs:
            func = as_the_engine_runs(func, args, node)
        given = list(_tensors_in(args))
        if self._in_step:
            for tensor in given:
                self._meet(tensor)
        out: Any = sparse_answer(func, args, node)
        if out is None:
            out = func(*args, **kwargs)
        self._see_call(func, args, kwargs, out, node)
        self.values.settle(func, args, out)
        if self._has_host and self._are_on_host(given):
            for tensor in _tensors_in((out,)):
                self.settle(tensor, HOST)
        return out

    @property
    def _in_step(self) -> bool:
        return self.phase not in ("setup", "inputs")

    def _meet(self, tensor: torch.Tensor) -> None:
        """Count a tensor that comes from elsewhere (a cache of a module, a global) at its first use.

        Raises:
            Untraceable: It is a parameter made outside: its gradient would be a fake.
        """
        if tensor.layout is not torch.strided or storage_key(tensor) in self.live or tensor.numel() <= 1:
            return
        if isinstance(tensor, torch.nn.Parameter) and not isinstance(tensor, FakeTensor):
            raise Untraceable(f"a parameter is used that was made outside setup{user_place()}")
        self._see(tensor, None, "existing")

    def _are_on_host(self, tensors: list[torch.Tensor]) -> bool:
        large = [tensor for tensor in tensors if tensor.numel() > 1]
        return bool(large) and all(map(self.is_on_host, large))

    def _see_call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, node: Any
    ) -> None:
        if self._kernels is None:
            self._see(out, node, func)
            return
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        memory = self._kernels.memory_of(KernelCall(func, args, kwargs, outputs, node is not None))
        if memory is None:
            self._see(out, node, func)
            return
        self.rules.setdefault(memory.rule)
        if memory.output_bytes:
            for tensor, size_bytes in zip(outputs, memory.output_bytes, strict=True):
                self._see(tensor, node, func, size_bytes=size_bytes)
        else:
            self._see(out, node, func)
        self._see_inside(memory, node, func)

    def _see_inside(self, memory: KernelMemory, node: Any, operator: Any) -> None:
        for key, size_bytes in memory.kept_bytes:
            if key not in self._kept:
                self._kept.add(key)
                self.blocks[self._allocate(size_bytes, node, operator)].category = "workspace"
        scratch = [self._allocate(size_bytes, node, operator) for size_bytes in memory.scratch_bytes]
        for index in scratch:
            self.blocks[index].category = "workspace"
            self._free(index)

    def see_existing(self, named: Iterable[tuple[str, torch.Tensor]], category: str) -> None:
        """Count tensors that exist already, such as parameters, and name them."""
        for name, tensor in named:
            self._see(tensor, None, "existing")
            self.settle(tensor, category, name)

    def settle(self, tensor: torch.Tensor | None, category: str, name: str = "") -> None:
        """Say what a live tensor is, and whose: the name of a parameter."""
        if tensor is None or (category == HOST and not self._has_host):
            return
        for part in parts_of(tensor):
            index = self.live.get(storage_key(part))
            if index is not None:
                self.blocks[index].category = category
                self.blocks[index].module = name or self.blocks[index].module

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a live tensor lies in host memory."""
        index = self.live.get(storage_key(tensor)) if tensor.layout is torch.strided else None
        return index is not None and self.blocks[index].category == HOST

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return the name that a live tensor was settled with, or nothing."""
        index = self.live.get(storage_key(tensor))
        return "" if index is None else self.blocks[index].module

    def forget(self) -> None:
        """Drop everything recorded so far."""
        self.blocks.clear()
        self.events.clear()
        self.live.clear()
        self._kept.clear()

    @property
    def live_bytes(self) -> int:
        """Bytes alive now."""
        return sum(self.blocks[index].bytes for index in self.live.values())

    def enter_module(self, module: torch.nn.Module) -> None:
        """Attribute what follows to `module`."""
        self._module_stack.append(self.module_names.get(id(module), type(module).__name__))

    def leave_module(self) -> None:
        """Return to the module that called the current one."""
        if self._module_stack:
            self._module_stack.pop()

    @contextlib.contextmanager
    def holding(self, size_bytes: int, operator: str) -> Iterator[None]:
        """Count bytes that are held meanwhile (outputs kept of earlier steps, say)."""
        if size_bytes <= 0:
            yield
            return
        index = self._allocate(size_bytes, None, operator)
        try:
            yield
        finally:
            self._free(index)

    def _see(self, out: Any, node: Any, operator: Any, size_bytes: int | None = None) -> None:
        for leaf in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            for tensor in parts_of(leaf) if isinstance(leaf, torch.Tensor) else ():
                storage = tensor.untyped_storage()
                key = storage._cdata
                bytes_ = storage.nbytes() if size_bytes is None else size_bytes
                if key not in self.live and bytes_ > 0:
                    index = self._allocate(bytes_, node, operator)
                    self.live[key] = index
                    self._references.append(weakref.ref(storage, self._on_release(key, index)))

    def _on_release(self, key: int, index: int) -> Any:
        def released(reference: object) -> None:
            if self.live.get(key) == index:
                del self.live[key]
                self._free(index)

        return released

    def _allocate(self, size_bytes: int, node: Any, operator: Any) -> int:
        phase, module = self.phase, self._module_stack[-1] if self._module_stack else ""
        if phase == "forward" and node is not None:
            phase = "backward"
            module = self._module_of_node.get(node._sequence_nr(), module)
        elif phase == "forward":
            self._module_of_node[torch._C._autograd._get_sequence_nr() - 1] = module
        category = {"inputs": "inputs", "setup": "parameters"}.get(phase, "temporaries")
        if phase == "forward" and torch.is_grad_enabled():
            category = "activations"
        self.blocks.append(Block(size_bytes, category, module, phase, self.step, str(operator)))
        self.events.append(len(self.blocks) - 1)
        return len(self.blocks) - 1

    def _free(self, index: int) -> None:
        block = self.blocks[index]
        if block.category == "activations" and self.phase == "forward" and not _in_backward():
            block.category = "temporaries"  # gone before backward began: nothing saved it
        self.events.append(~index)


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def _in_backward() -> bool:
    return torch._C._current_autograd_node() is not None
