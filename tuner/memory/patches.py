"""What is changed in the process while a step is traced, and changed back.

Patches hold for the tracing thread alone: another one may train meanwhile (`optimize(n_jobs=2)`), and
gets the original. Two traces never overlap (`trace.py` takes them in turn).
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

_MISSING = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    """Let `owner.name` be `value` for calls of this thread."""
    thread, original = threading.get_ident(), getattr(owner, name)
    kept = vars(owner).get(name, _MISSING)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        function = value if threading.get_ident() == thread else original
        return function(*args, **kwargs)

    setattr(owner, name, chosen)
    try:
        yield
    finally:
        if kept is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, kept)


def replaced_everywhere(
    name: str, value: Callable[..., Any], packages: tuple[str, ...]
) -> AbstractContextManager[object]:
    """Replace a function in every loaded module below `packages` that imported it."""
    stack = contextlib.ExitStack()
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(packages) and name in vars(module):
            stack.enter_context(replaced(module, name, value))
    return stack


@contextlib.contextmanager
def restored_state() -> Iterator[None]:
    """Restore what user code may set for the whole process: random states, defaults, switches."""
    numpy_random = sys.modules.get("numpy.random")
    python_state, torch_state = random.getstate(), torch.random.get_rng_state()
    numpy_state = None if numpy_random is None else numpy_random.get_state()
    switches = [(switch, ask()) for switch, ask in _SWITCHES]
    cudnn = {name: getattr(torch.backends.cudnn, name) for name in _CUDNN}
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.random.set_rng_state(torch_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)
        for switch, value in switches:
            switch(value)
        for name, value in cudnn.items():
            setattr(torch.backends.cudnn, name, value)


_SWITCHES: tuple[tuple[Callable[[Any], Any], Callable[[], Any]], ...] = (
    (torch.set_default_dtype, torch.get_default_dtype),
    (torch.set_grad_enabled, torch.is_grad_enabled),
    (torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled),
    (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision),
    (torch.set_num_threads, torch.get_num_threads),
    (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.flash_sdp_enabled),
    (torch.backends.cuda.enable_mem_efficient_sdp, torch.backends.cuda.mem_efficient_sdp_enabled),
    (torch.backends.cuda.enable_math_sdp, torch.backends.cuda.math_sdp_enabled),
    (torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled),
)
_CUDNN = ("enabled", "benchmark", "deterministic")
