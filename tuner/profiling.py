"""The CPU allocator's true peak during a piece of code, from PyTorch's profiler.

The profiler reports every allocation and release of the CPU allocator with its size, temporaries
inside kernels included; summed in time order they give the peak. The sum starts at zero: what
was alive before is not in it, and its release is not reported either.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would print a line at each start


@dataclass
class AllocatorPeak:
    """Filled in when the profiled code has run: peak of the running sum, in bytes."""

    bytes: int = 0


@contextmanager
def profiled_peak() -> Iterator[AllocatorPeak]:
    """Profile the body; the yielded object holds the peak afterwards."""
    from torch.profiler import ProfilerActivity, profile

    found = AllocatorPeak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    inner = profiler.profiler
    assert inner is not None and inner.kineto_results is not None
    events = [event for event in inner.kineto_results.events() if event.name() == "[memory]"]
    running_bytes = 0
    for event in sorted(events, key=lambda event: int(event.start_ns())):
        running_bytes += event.nbytes()
        found.bytes = max(found.bytes, running_bytes)
