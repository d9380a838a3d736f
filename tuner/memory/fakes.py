"""A fake world for user code: tensors without data, no GPU, no random state disturbed.

`FakeWorld` is what a step is traced in:

* tensors are fake CPU tensors (shapes and dtypes, no memory);
* `cuda`, in any spelling, means the fakes' device (a `TorchFunctionMode`);
* a `setup` that needs the *value* of a tensor runs on real CPU tensors instead, and the state it
  returns is turned into fakes: a neutral answer there would shape another model, silently.

It does not see custom C++ operators without a fake implementation, nor threads the step starts.
"""

from __future__ import annotations

import contextlib
import copy
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tuner.memory.patches import replaced, restored_state
from tuner.memory.rules import Journal, Substitute


class SharedFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode that modules may deep-copy: `nn.TransformerEncoder` copies its layer."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedFakeMode:
        return self


class _CudaMeansCpu(TorchFunctionMode):
    """Answer every request for a `cuda` device with the CPU, where the fakes live.

    Functions that the target runs in another way are answered by their substitutes.
    """

    def __init__(self, substitutes: Mapping[Any, Substitute] | None = None, journal: Any = None) -> None:
        super().__init__()
        self._substitutes = substitutes or {}
        self._journal = journal

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        substitute = self._substitutes.get(func)
        if substitute is not None:
            return substitute(self._journal, func, args, kwargs)
        if func is torch.Tensor.cuda:
            return args[0]
        device = kwargs.get("device")
        if device is not None and _is_cuda(device):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if func is torch.Tensor.to:
            args = (
                args[0],
                *(torch.device("cpu") if _is_cuda(argument) else argument for argument in args[1:]),
            )
        return func(*args, **kwargs)


def device_kind(device: object) -> str | None:
    """Return `cpu`, `cuda` or another type for what names a device, else None; a number names a GPU."""
    if isinstance(device, torch.device):
        return device.type
    if isinstance(device, str):
        return device.partition(":")[0]
    return "cuda" if isinstance(device, int) and not isinstance(device, bool) else None


def _is_cuda(device: object) -> bool:
    return device_kind(device) == "cuda"


class FakeWorld:
    """The modes and patches under which user code is traced; a context manager.

    On leaving, patches are undone and random states and other state of the process restored.

    Args:
        substitutes: Functions that the target runs in another way.
        journal: Where substitutes say what they did.
    """

    def __init__(
        self, substitutes: Mapping[Any, Substitute] | None = None, journal: Journal | None = None
    ) -> None:
        self.mode = SharedFakeMode(allow_non_fake_inputs=True)
        self._functions = _CudaMeansCpu(substitutes, journal)
        self._substitutes, self._journal = substitutes or {}, journal
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> FakeWorld:
        try:
            return self._entered()
        except BaseException:
            self._stack.close()
            raise

    def _entered(self) -> FakeWorld:
        self._stack.enter_context(restored_state())
        self._stack.enter_context(self.mode)
        self._stack.enter_context(self._functions)
        self._stack.enter_context(_inside_functional(self._substitutes, self._journal))
        self._stack.enter_context(_no_op_initialisers())
        self._stack.enter_context(_modules_convert_plainly())
        self._stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # fakes warn of data pointers that nobody will use
        self._stack.enter_context(replaced(torch, "set_default_device", lambda device: None))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def real(self) -> Iterator[None]:
        """Leave the fake world for a while: tensors made here have data."""
        with torch.utils._python_dispatch._disable_current_modes(), _CudaMeansCpu():
            yield

    def to_fake(self, value: Any) -> Any:
        """Return `value` with every real tensor in it replaced, shared references kept.

        Modules, optimizers, containers and what functions close over are copied; parameters stay
        parameters, and one tensor that is referenced twice becomes one fake.
        """
        fakes: dict[int, torch.Tensor] = {}

        def fake_of(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
            if isinstance(tensor, FakeTensor):
                return tensor
            if id(tensor) not in fakes:
                fake: torch.Tensor = self.mode.from_tensor(tensor.detach(), static_shapes=True)
                if isinstance(tensor, torch.nn.Parameter):
                    fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
                elif tensor.requires_grad:
                    fake.requires_grad_()
                fakes[id(tensor)] = fake
                memo[id(tensor)] = fake
            return fakes[id(tensor)]

        with (
            replaced(torch.Tensor, "__deepcopy__", fake_of),
            replaced(torch.nn.Parameter, "__deepcopy__", fake_of),
            _functions_copied_with_their_closures(),
        ):
            return copy.deepcopy(value)

    def batch_to_fake(self, batch: Any) -> Any:
        """Return a batch (any nesting of containers) with its real tensors made fake."""

        def fake(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
                return self.mode.from_tensor(leaf, static_shapes=True)
            return leaf

        return tree_map(fake, batch)


@contextlib.contextmanager
def _inside_functional(substitutes: Mapping[Any, Substitute], journal: Journal | None) -> Iterator[None]:
    """Put substitutes where PyTorch's own Python functions look: no mode is on inside these."""
    with contextlib.ExitStack() as stack:
        for function, substitute in substitutes.items():
            answer = _answering(function, substitute, journal)
            for owner in (torch.nn.functional, torch._VF):
                if getattr(owner, function.__name__, None) == function:
                    stack.enter_context(replaced(owner, function.__name__, answer))
        yield


def _answering(function: Any, substitute: Substitute, journal: Any) -> Any:
    def answer(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return substitute(journal, function, args, kwargs)

    return answer


@contextlib.contextmanager
def _functions_copied_with_their_closures() -> Iterator[None]:
    """Let `copy.deepcopy` copy what a function closes over; it shares functions otherwise."""
    dispatch: dict[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]
    original = dispatch[types.FunctionType]
    dispatch[types.FunctionType] = _copied_function
    try:
        yield
    finally:
        dispatch[types.FunctionType] = original


def _copied_function(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    if function.__closure__ is None:
        return function
    cells = tuple(types.CellType() for _ in function.__closure__)
    copied = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    memo[id(function)] = copied
    for cell, original in zip(cells, function.__closure__, strict=True):
        with contextlib.suppress(ValueError):  # a cell may be empty still
            cell.cell_contents = _copied_or_shared(original.cell_contents, memo)
    return copied


def _copied_or_shared(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except TypeError:  # a lock, a generator, a module: nothing with tensors that could be copied
        return value


@contextlib.contextmanager
def _modules_convert_plainly() -> Iterator[None]:
    """Let `module.to(...)` replace parameters: the usual way swaps them, which fakes refuse."""

    def apply(module: torch.nn.Module, convert: Any, recurse: bool = True) -> torch.nn.Module:  # noqa: FBT001, FBT002
        return _apply_plainly(module, convert, {})

    with replaced(torch.nn.Module, "_apply", apply):
        yield


def _apply_plainly(module: torch.nn.Module, convert: Any, done: dict[int, Any]) -> torch.nn.Module:
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in done:
                with torch.no_grad():
                    converted = convert(parameter)
                done[id(parameter)] = _converted_in_place(parameter, converted)
            child._parameters[name] = done[id(parameter)]
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = convert(buffer)
    return module


def _converted_in_place(parameter: torch.nn.Parameter, converted: torch.Tensor) -> torch.nn.Parameter:
    """Return the same parameter, as PyTorch does, so that an optimizer made before still knows it."""
    if converted.device != parameter.device:  # off the meta device
        return torch.nn.Parameter(converted, parameter.requires_grad)
    if converted.dtype != parameter.dtype or converted.stride() != parameter.stride():
        parameter.data = converted
    return parameter


# Initialisers only fill memory that exists already; several of them (trunc_normal_) read values.
_INITIALISERS = (
    "uniform_",
    "normal_",
    "trunc_normal_",
    "xavier_uniform_",
    "xavier_normal_",
    "kaiming_uniform_",
    "kaiming_normal_",
    "orthogonal_",
    "sparse_",
    "dirac_",
    "eye_",
)


@contextlib.contextmanager
def _no_op_initialisers() -> Iterator[None]:
    def untouched(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor

    with contextlib.ExitStack() as stack:
        for name in _INITIALISERS:
            stack.enter_context(replaced(torch.nn.init, name, untouched))
        yield
