"""What a target does otherwise than the CPU fakes that a step is traced on.

A target's `Rules` say three things: which buffers a kernel takes beyond what a fake run shows
(`KernelModel`), which functions the target runs in place of those that the CPU would
(`Substitute`), and what is patched while tracing. Each rule has a name, which a trace keeps when
the rule applied, so that a prediction can say what it rests on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

HOST = "host"  # the category of what a CUDA program keeps in host memory
COMPILED = "torch.compile"  # the rule that says that an eager trace stands for a compiled step


@dataclass(frozen=True)
class KernelMemory:
    """What one call of an operator takes beyond what a fake run shows.

    Attributes:
        scratch_bytes: Buffers that are alive together beside the outputs until the call returns.
        output_bytes: Size of each output's storage, in order (None for no tensor); empty where
            the fake outputs have the right size.
        kept_bytes: Buffers that stay until the process ends, taken once for each key.
        rule: The name of the rule.
    """

    scratch_bytes: tuple[int, ...] = ()
    output_bytes: tuple[int | None, ...] = ()
    kept_bytes: tuple[tuple[str, int], ...] = ()
    rule: str = ""


@dataclass(frozen=True)
class KernelCall:
    """One call of an operator on fake tensors.

    Attributes:
        operator: An overload such as `aten.convolution.default`.
        arguments: Its positional arguments.
        options: Its keyword arguments.
        outputs: What it returned, as a sequence.
        in_backward: Whether the autograd engine made the call: on CUDA, a thread of its own.
    """

    operator: Any
    arguments: Sequence[Any]
    options: Mapping[str, Any]
    outputs: Sequence[Any]
    in_backward: bool


class KernelModel(Protocol):
    """Knows what kernels allocate inside themselves."""

    def memory_of(self, call: KernelCall) -> KernelMemory | None:
        """Return what a call takes beyond its fake outputs; None where there is nothing."""


class Journal(Protocol):
    """Where rules say what they did: the names of those that applied, and assumptions."""

    rules: dict[str, None]
    notes: dict[str, None]

    def settle(self, tensor: Any, category: str) -> None:
        """Say what a live tensor is."""

    def is_on_host(self, tensor: Any) -> bool:
        """Whether a live tensor lies in host memory."""


Substitute = Callable[[Journal, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called with (journal, function, args, kwargs) in place of a function of `torch`."""


@dataclass(frozen=True)
class Rules:
    """How a target differs from CPU fakes.

    Attributes:
        device: The device type that user code is told: `cpu` or `cuda`.
        kernels: Knows the memory of kernels; None where operators need their outputs alone.
        substitutes: Functions of `torch` that the target runs in another way.
        patches: What is changed while tracing, undone afterwards; given the journal.
    """

    device: str = "cpu"
    kernels: KernelModel | None = None
    substitutes: Mapping[Any, Substitute] = field(default_factory=dict)
    patches: Callable[[Journal], AbstractContextManager[None]] = lambda journal: contextlib.nullcontext()
