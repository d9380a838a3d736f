"""Calls of the CUDA runtime in a step: without a GPU they raise, though they allocate nothing.

Waiting, streams, events and resets of statistics do nothing while tracing; statistics are zero. What
runs on a second stream is counted as on the first: blocks that `record_stream` would hold back
are released at once, which the prediction does not see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from tuner.memory.patches import replaced


class _Nothing:
    """A stream, an event, a context: every method does nothing."""

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*args: Any, **kwargs: Any) -> _Nothing:
    return _Nothing()


_SILENT = (
    "synchronize",
    "set_device",
    "reset_peak_memory_stats",
    "empty_cache",
    "manual_seed",
    "manual_seed_all",
)
_OBJECTS = ("Stream", "Event", "stream", "current_stream", "default_stream")
_ZERO = (
    "current_device",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
)


@contextlib.contextmanager
def silent_runtime() -> Iterator[None]:
    """Let a step call the runtime where there is no GPU."""
    with contextlib.ExitStack() as stack:
        for name in _SILENT:
            stack.enter_context(replaced(torch.cuda, name, lambda *args, **kwargs: None))
        for name in _ZERO:
            stack.enter_context(replaced(torch.cuda, name, lambda *args, **kwargs: 0))
        for name in _OBJECTS:
            stack.enter_context(replaced(torch.cuda, name, _nothing))
        yield
