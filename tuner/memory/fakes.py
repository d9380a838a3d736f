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
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class SharedFakeMode(FakeTensorMode):
    """A fake mode that modules may deep-copy: `nn.TransformerEncoder` copies its layer."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedFakeMode:
        return self


class _CudaMeansCpu(TorchFunctionMode):
    """Answer every request for a `cuda` device with the CPU, where the fakes live."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return func(*args, **kwargs)
        device = kwargs.get("device")
        if device is not None and _is_cuda(device):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if func is torch.Tensor.to:
            args = tuple(torch.device("cpu") if _is_cuda(argument) else argument for argument in args)
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and (device == "cuda" or device.startswith("cuda:"))


class FakeWorld:
    """The modes and patches under which user code is traced; a context manager.

    On leaving, patches are undone and the random states of Python and PyTorch restored.
    """

    def __init__(self) -> None:
        self.mode = SharedFakeMode(allow_non_fake_inputs=True)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> FakeWorld:
        self._stack.enter_context(_restored_random_state())
        self._stack.enter_context(self.mode)
        self._stack.enter_context(_CudaMeansCpu())
        self._stack.enter_context(_no_op_initialisers())
        self._stack.enter_context(_modules_convert_plainly())
        self._stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # fakes warn of data pointers that nobody will use
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def real(self) -> Iterator[None]:
        """Leave the fake world for a while: tensors made here have data."""
        with torch.utils._python_dispatch._disable_current_modes():
            with _CudaMeansCpu():
                yield

    def to_fake(self, value: Any) -> Any:
        """Return `value` with every real tensor in it replaced, shared references kept.

        Modules, optimizers and containers are copied; parameters stay parameters, and one
        tensor that is referenced twice becomes one fake.
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

        tensor_deepcopy, parameter_deepcopy = torch.Tensor.__deepcopy__, torch.nn.Parameter.__deepcopy__
        torch.Tensor.__deepcopy__ = fake_of  # type: ignore[method-assign]
        torch.nn.Parameter.__deepcopy__ = fake_of  # type: ignore[method-assign]
        try:
            return copy.deepcopy(value)
        finally:
            torch.Tensor.__deepcopy__ = tensor_deepcopy  # type: ignore[method-assign]
            torch.nn.Parameter.__deepcopy__ = parameter_deepcopy  # type: ignore[method-assign]

    def batch_to_fake(self, batch: Any) -> Any:
        """Return a batch (any nesting of containers) with its real tensors made fake."""

        def fake(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
                return self.mode.from_tensor(leaf, static_shapes=True)
            return leaf

        return tree_map(fake, batch)


@contextlib.contextmanager
def _restored_random_state() -> Iterator[None]:
    numpy_random = sys.modules.get("numpy.random")
    python_state, torch_state = random.getstate(), torch.random.get_rng_state()
    numpy_state = None if numpy_random is None else numpy_random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.random.set_rng_state(torch_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)


@contextlib.contextmanager
def _modules_convert_plainly() -> Iterator[None]:
    """Let `module.to(...)` replace parameters: the usual way swaps them, which fakes refuse."""
    original = torch.nn.Module._apply

    def apply(module: torch.nn.Module, convert: Any, recurse: bool = True) -> torch.nn.Module:
        return _apply_plainly(module, convert, {})

    torch.nn.Module._apply = apply  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.nn.Module._apply = original  # type: ignore[method-assign]


def _apply_plainly(module: torch.nn.Module, convert: Any, done: dict[int, Any]) -> torch.nn.Module:
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in done:
                with torch.no_grad():
                    converted = convert(parameter)
                kept = converted is parameter or converted.dtype == parameter.dtype
                done[id(parameter)] = (
                    parameter if kept else torch.nn.Parameter(converted, parameter.requires_grad)
                )
            child._parameters[name] = done[id(parameter)]
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = convert(buffer)
    return module


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

    originals = {name: getattr(torch.nn.init, name) for name in _INITIALISERS}
    try:
        for name in _INITIALISERS:
            setattr(torch.nn.init, name, untouched)
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.nn.init, name, original)
