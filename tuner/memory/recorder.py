"""Records every allocation and release of a program that runs on fake tensors.

A dispatch mode above the fake mode sees each operator's outputs; a storage that was not seen
before is an allocation, and a weak reference's callback is its release.

Two traps of tracing are mended here:

* Where one tensor feeds two consumers, autograd adds gradients in place in a real run but out of
  place for tensor subclasses (`InputBuffer::accumulate`): such an `add` is done in place.
* `.item()` has no value to return. In a step, the answer is neutral (1, or what a constant really
  is); in `setup` it raises, since the value may shape the model.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tuner.errors import Untraceable
from tuner.memory.rules import KernelCall, KernelMemory, KernelModel
from tuner.memory.sparse import parts_of, sparse_answer

_aten = torch.ops.aten
_device_of = torch.ops.prim.device.default
_DATA_DEPENDENT = {
    _aten.nonzero.default: "a boolean mask or nonzero()",
    _aten.masked_select.default: "masked_select()",
    _aten._unique2.default: "unique()",
    _aten.repeat_interleave.Tensor: "repeat_interleave() with a tensor of counts",
}
_RANDOM_NUMBER = 0.99
_LOOP_LIMIT = 10_000  # answers at one place before it must be a loop on a tensor's value
# Nodes whose own formula adds; there an add is the formula's, not the engine's.
_ADDING_NODES = ("Logsumexp", "Pow", "Std", "Var", "Norm", "Cumprod", "Prod", "Linalg", "WeightNorm", "Lerp")
# A fake's storage is held by its tensor and by the Python object that was asked for it.
_UNIQUE_STORAGE_COUNT = 2


class NeedsRealValues(Untraceable):
    """`setup` asked for the value of a tensor: it must run on real tensors."""


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
    """

    def __init__(self, kernels: KernelModel | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks: list[Block] = []
        self.events: list[int] = []
        self.live: dict[int, int] = {}
        self.phase = "setup"
        self.step = 0
        self.notes: dict[str, None] = {}
        self.rules: dict[str, None] = {}
        self.module_names: dict[int, str] = {}
        self._module_stack: list[str] = []
        self._module_of_node: dict[int, str] = {}
        self._references: list[weakref.ref[Any]] = []  # a reference must live to call back
        self._answers: Counter[str] = Counter()
        self._kernels = kernels
        self._kept: set[str] = set()
        self._alone = _references_of_engine()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _device_of and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two calls in three ask for this; the long way costs 50 µs
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:
            return self._neutral_answer(args[0])
        if func in _DATA_DEPENDENT:
            raise Untraceable(f"{_DATA_DEPENDENT[func]} makes a shape that depends on data{_user_place()}")
        node = torch._C._current_autograd_node()
        if func is _aten.add.Tensor and node is not None and not kwargs and _added_by_engine(node):
            gathered = args[0]
            references = (gathered._use_count(), sys.getrefcount(gathered)) if _is_fake(gathered) else ()
            if references and self._is_added_in_place(gathered, args[1], references):
                _aten.add_.Tensor(gathered, args[1])
                return gathered
        out: Any = sparse_answer(func, args, node)
        if out is None:
            out = func(*args, **kwargs)
        self._see_call(func, args, kwargs, out, node)
        if func is _aten.rand.default and out.numel() == 1 and _is_fake(out):
            self._make_known(out)
        return out

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

    def _is_added_in_place(self, gathered: Any, arriving: Any, references: tuple[int, ...]) -> bool:
        """Whether the engine would add an arriving gradient into the one it has gathered so far.

        `can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp: nobody else holds the
        gathered one, and its storage is dense. The arriving one is never added into.
        """
        if torch.is_grad_enabled() or gathered.shape != arriving.shape:
            return False
        if any(count > alone for count, alone in zip(references, self._alone, strict=True)):
            return False
        if torch._C._storage_Use_Count(_storage_key(gathered)) > _UNIQUE_STORAGE_COUNT:
            return False
        return bool(gathered.untyped_storage().nbytes() == gathered.numel() * gathered.element_size())

    def see_existing(self, tensors: Iterator[torch.Tensor], category: str) -> None:
        """Count tensors that exist already, such as parameters made outside the mode."""
        for tensor in tensors:
            self._see(tensor, None, "existing")
            self.settle(tensor, category)

    def settle(self, tensor: torch.Tensor | None, category: str) -> None:
        """Name what a live tensor is."""
        if tensor is None:
            return
        for part in parts_of(tensor):
            index = self.live.get(_storage_key(part))
            if index is not None:
                self.blocks[index].category = category

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

    def pass_through_peak(self, size_bytes: int, operator: str) -> None:
        """Count bytes that are allocated and released at once (kept eval outputs, say)."""
        self._pass_through(size_bytes, None, operator)

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

    def _pass_through(self, size_bytes: int, node: Any, operator: Any) -> None:
        index = self._allocate(size_bytes, node, operator)
        self.blocks[index].category = "workspace"
        self._free(index)

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

    def _make_known(self, scalar: FakeTensor) -> None:
        """Give a random number a value near its upper end, as if no layer were dropped.

        `torch.rand([]) < layerdrop` decides whether a layer runs: a neutral answer to the comparison
        would skip them all.
        """
        with _disable_current_modes():
            scalar.constant = torch.full(scalar.shape, _RANDOM_NUMBER, dtype=scalar.dtype)
        scalar.fake_mode.fake_tensor_converter.add_constant_storage_mapping(scalar)
        self.notes[f"a random number drawn{_user_place()} was taken as {_RANDOM_NUMBER}"] = None

    def _neutral_answer(self, tensor: torch.Tensor) -> Any:
        constant = getattr(tensor, "constant", None)
        if constant is not None:
            with _disable_current_modes():
                return constant.item()
        if not isinstance(tensor, FakeTensor):
            return _aten._local_scalar_dense.default(tensor)
        if self.phase in ("setup", "inputs"):
            raise NeedsRealValues(f"the value of a tensor is needed{_user_place()}")
        place = _user_place()
        if place:  # an optimizer reads one step counter per parameter: no limit for those
            self._answers[place] += 1
            if self._answers[place] > _LOOP_LIMIT:
                raise Untraceable(f"a loop depends on the value of a tensor{place}")
            self.notes[f"the value of a tensor read{place} was taken as 1"] = None
        neutral = 0 if _called_by("grad_scaler.py") else 1
        if tensor.dtype is torch.bool:
            return bool(neutral)
        return float(neutral) if tensor.dtype.is_floating_point else neutral


def _storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _in_backward() -> bool:
    return torch._C._current_autograd_node() is not None


def _added_by_engine(node: Any) -> bool:
    return not node.name().startswith(_ADDING_NODES)


def _is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


@functools.cache
def _references_of_engine() -> tuple[int, int]:
    """Return how often a gradient is referenced, in C++ and Python, that only the engine holds."""
    seen: list[tuple[int, int]] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func is _aten.add.Tensor and torch._C._current_autograd_node() is not None:
                gathered = args[0]  # one more name, as where the recorder counts
                seen.append((gathered._use_count(), sys.getrefcount(gathered)))
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Watch():  # type: ignore[no-untyped-call]
        x = torch.empty(1, requires_grad=True) * 1
        (x * 2 + x * 3).backward()  # type: ignore[no-untyped-call]
    return seen[0]


_TORCH_FOLDER = torch.__path__[0]
_OWN_FOLDER = __file__.rsplit("/", 2)[0]


def _user_place() -> str:
    """Return ` at file.py:line` of the innermost frame outside PyTorch and this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH_FOLDER, _OWN_FOLDER, "<")):
            return f" at {name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        if name.startswith(_TORCH_FOLDER + "/optim"):
            return ""
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _called_by(file_name: str) -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(file_name):
            return True
        frame = frame.f_back
    return False
