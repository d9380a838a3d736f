"""Case D16: the same work has the same allocated peak whatever ran before; the rest does not.

What a GPU would show of reserved bytes is shown with the model of CUDA's caching allocator, which
gives every address of the real traces it was checked with.
"""

from __future__ import annotations

import json
import subprocess
import sys

from tests.conftest import ROOT, clean_environment
from tuner.memory.allocator import AllocatorBlock, CachingAllocator
from tuner.units import MIB

# Trains a small model on a CPU; says the profiled peak of its allocations and the resident peak.
WORK = """
import json, sys, torch
from torch import nn
from tuner.processes import process_memory
from tuner.profiling import profiled_peak
from tuner.warmup import warm_up

def train(width):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 256))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()

torch.set_num_threads(1)
warm_up(torch.device("cpu"))
with profiled_peak() as before:
    if sys.argv[1] == "after":
        train(16384)
with profiled_peak() as peak:
    train(1024)
print(json.dumps([peak.bytes, process_memory().peak_resident_bytes, before.bytes]))
"""


def worked(when: str) -> tuple[int, int, int]:
    done = subprocess.run(
        [sys.executable, "-c", WORK, when],
        env=clean_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    allocated, resident, larger = json.loads(done.stdout)
    return allocated, resident, larger


def test_the_allocated_peak_is_equal_in_a_fresh_process_and_after_a_larger_model() -> None:
    """± 0 bytes; the resident peak, which keeps what ran before, differs by more than 100 MiB."""
    fresh_allocated, fresh_resident, _ = worked("fresh")
    allocated, resident, larger = worked("after")

    assert larger > 10 * allocated  # the larger model really was one
    assert allocated == fresh_allocated
    assert resident - fresh_resident > 100 * MIB


def step(allocator: CachingAllocator, sizes: list[int]) -> None:
    """Allocate in turn and free in the opposite order, with one temporary beside each."""
    held: list[AllocatorBlock] = []
    for size in sizes:
        held.append(allocator.allocate(size))
        allocator.free(allocator.allocate(size // 2))
    while held:
        allocator.free(held.pop())


def peaks_of(allocator: CachingAllocator) -> tuple[int, int]:
    """Return the peaks of allocated and reserved bytes of the small model's step, counted anew."""
    allocator.peak_allocated_bytes = allocator.allocated_bytes
    allocator.peak_reserved_bytes = allocator.reserved_bytes
    step(allocator, SMALL)
    return allocator.peak_allocated_bytes, allocator.peak_reserved_bytes


SMALL = [3 * MIB, 5 * MIB, 12 * MIB + 512, 700_160, 30 * MIB]
LARGE = [size * 9 for size in SMALL]


def test_reserved_bytes_depend_on_what_ran_before_so_that_they_need_a_fresh_process() -> None:
    """The worker is one process per trial; emptying the cache would do too, where nothing is left alive.

    Allocated bytes are equal to the byte here. Where a request gets a free block of up to 1 MiB
    more than it asked for, the allocator counts that block whole (case D05).
    """
    fresh = peaks_of(CachingAllocator())
    used = CachingAllocator()
    step(used, LARGE)
    after = peaks_of(used)
    used.empty_cache()
    emptied = peaks_of(used)

    assert after[0] == fresh[0]
    assert after[1] > 5 * fresh[1]
    assert emptied == fresh
