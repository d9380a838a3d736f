"""The CPU allocator's true peak during a piece of code, from PyTorch's profiler.

The profiler reports every allocation and release of the CPU allocator with its size, temporaries
inside kernels included; summed in time order they give the peak. The sum starts at zero: what
was alive before is not in it, and its release is not reported either.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would print a line at each start


@dataclass
class AllocatorProfile:
    """Filled in when the profiled code has run.

    Attributes:
        changes: What each event allocated (positive) or released (negative), in time order, bytes.
    """

    changes: list[int] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """The peak of the running sum, in bytes."""
        return peak_of(self.changes)


def peak_of(changes: Iterable[int]) -> int:
    """Return the peak of a running sum that starts at zero."""
    return max(accumulate(changes), default=0)


@contextmanager
def profiled_peak() -> Iterator[AllocatorProfile]:
    """Profile the body; the yielded object holds the events and their peak afterwards."""
    from torch.profiler import ProfilerActivity, profile

    found = AllocatorProfile()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    inner = profiler.profiler
    assert inner is not None
    assert inner.kineto_results is not None
    events = [event for event in inner.kineto_results.events() if event.name() == "[memory]"]
    found.changes = [event.nbytes() for event in sorted(events, key=lambda event: int(event.start_ns()))]
