"""Meters: peaks between readings, and a context that is known, assumed, or not known (case D40)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.measure.conftest import Driver
from tuner.measure import nvml
from tuner.measure.cuda_meter import CudaMeter
from tuner.measure.meters import CpuMeter, open_meter, used_before
from tuner.units import GIB, MIB

CUDA = torch.device("cuda", 0)
OURS = os.getpid()
IDLE = nvml.Before(3 * MIB, shared=False)


class FakeTorch:
    """`torch.cuda`'s counters of one device, driven by the test; 20 MiB are reserved at first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak_allocated = 18 * MIB
        self.reserved = self.peak_reserved = 20 * MIB
        self.synchronized = 0
        for name, function in {
            "synchronize": self._synchronize,
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": self._reset,
            "memory_reserved": lambda device: self.reserved,
            "get_device_properties": lambda device: SimpleNamespace(total_memory=12 * GIB),
            "memory_stats_as_nested_dict": self._statistics,
        }.items():
            assert callable(getattr(torch.cuda, name))
            monkeypatch.setattr(torch.cuda, name, function)

    def holds(self, allocated: int, reserved: int) -> None:
        self.allocated, self.reserved = allocated, reserved
        self.peak_allocated = max(self.peak_allocated, allocated)
        self.peak_reserved = max(self.peak_reserved, reserved)

    def _synchronize(self, device: torch.device) -> None:
        self.synchronized += 1

    def _reset(self, device: torch.device) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _statistics(self, device: torch.device) -> dict[str, dict[str, dict[str, int]]]:
        return {
            "allocated_bytes": {"all": {"current": self.allocated, "peak": self.peak_allocated}},
            "reserved_bytes": {"all": {"current": self.reserved, "peak": self.peak_reserved}},
        }


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    return FakeTorch(monkeypatch)


def test_epochs_and_phases_have_their_own_peaks_on_cuda(cuda: FakeTorch, driver: Driver) -> None:
    """NVML shows 320 MiB for this process, of which 20 MiB are PyTorch's: the context is 300 MiB."""
    driver(PROCESSES=f"{OURS}:{320 * MIB}")
    meter = open_meter(CUDA, IDLE)
    epochs = []
    for size in (100, 400, 200):
        with meter.phase("train"):
            cuda.holds(size * MIB, (size + 10) * MIB)
            cuda.holds(50 * MIB, (size + 10) * MIB)
        with meter.phase("eval"):
            cuda.holds(30 * MIB, 40 * MIB)
        epochs.append(meter.epoch_ended())

    assert [(epoch.allocated_bytes, epoch.reserved_bytes) for epoch in epochs] == [
        (100 * MIB, 110 * MIB), (400 * MIB, 410 * MIB), (200 * MIB, 210 * MIB)
    ]  # fmt: skip
    assert [epoch.device_bytes for epoch in epochs] == [410 * MIB, 710 * MIB, 510 * MIB]
    peaks = meter.peaks()
    assert (peaks.device_bytes, peaks.allocated_bytes, peaks.reserved_bytes) == (
        710 * MIB, 400 * MIB, 410 * MIB
    )  # fmt: skip
    assert peaks.phases == {"train": 710 * MIB, "eval": 710 * MIB}  # the first thing eval holds is train's
    assert peaks.source == "nvml, this process + torch.cuda reserved"
    assert (peaks.used_before_bytes, peaks.device_wide_bytes) == (3 * MIB, None)
    assert max(point.bytes for point in meter.timeline.points) == peaks.device_bytes
    assert cuda.synchronized == 1  # for the baseline, and never again


@pytest.mark.parametrize(
    ("processes", "before", "assumed", "context", "source"),
    [
        (f"{OURS}:{320 * MIB}", IDLE, None, 300, "nvml, this process + torch.cuda reserved"),
        ("", IDLE, None, 989, "nvml, growth of the device's use + torch.cuda reserved"),
        (f"{OURS}:?", IDLE, None, 989, "nvml, growth of the device's use + torch.cuda reserved"),
        ("", IDLE, 450, 450, "the study's context + torch.cuda reserved"),
        ("", nvml.Before(3 * MIB, shared=True), None, None, "torch.cuda reserved, context unknown"),
        ("", nvml.Before(), None, None, "torch.cuda reserved, context unknown"),
        # A number that was there before us, and one that holds less than we do, are not ours.
        (
            f"{OURS}:{320 * MIB}",
            nvml.Before(3 * MIB, shared=True, listed=True),
            None,
            None,
            "torch.cuda reserved, context unknown",
        ),
        (f"{OURS}:{19 * MIB}", IDLE, 450, 450, "the study's context + torch.cuda reserved"),
    ],
    ids=["ours", "alone", "not available", "assumed", "others", "no NVML", "listed before", "implausible"],
)
def test_the_context_is_this_processs_or_it_is_not_known(
    processes: str,
    before: nvml.Before,
    assumed: int | None,
    context: int | None,
    source: str,
    cuda: FakeTorch,
    driver: Driver,
) -> None:
    """The device shows 1,012 MiB in use, 3 MiB before; PyTorch has reserved 20 MiB, then 100 MiB."""
    driver(PROCESSES=processes)
    meter = CudaMeter(CUDA, before, context_bytes=None if assumed is None else assumed * MIB)
    cuda.holds(90 * MIB, 100 * MIB)

    peaks = meter.peaks()

    known = context is not None
    assert peaks.baseline_bytes == (context * MIB if known else None)
    assert peaks.device_bytes == ((context + 100) * MIB if known else None)
    assert peaks.source == source
    assert len(source) <= 64  # tuner_trial.peak_source
    assert (peaks.allocated_bytes, peaks.reserved_bytes) == (90 * MIB, 100 * MIB)
    assert peaks.device_wide_bytes == (None if "this process" in source else 1012 * MIB)
    assert bool(meter.warnings()) is not known
    assert meter.epoch_ended().device_bytes == peaks.device_bytes


def test_two_small_blocks_a_step_are_growth_on_cuda(cuda: FakeTorch, driver: Driver) -> None:
    """A loss and the running total: 2 × 512 B a step, counted by hand; a step's own use comes and goes."""
    driver(PROCESSES=f"{OURS}:{320 * MIB}")
    meter = open_meter(CUDA, IDLE)
    for step in range(100):
        cuda.holds(100 * MIB + 1024 * step, 130 * MIB)
        cuda.holds(20 * MIB + 1024 * step, 130 * MIB)
        meter.step_ended(training=True)

    assert meter.growth_bytes() == 1024
    assert meter.warnings() == ["memory grows by 1.0 KiB per training step"]


TOUCHES_AND_GIVES_BACK = """
import torch
from tuner.measure.meters import CpuMeter

meter = CpuMeter()
baseline = meter.peaks().baseline_bytes
for size in (64, 8, 32):
    held = torch.ones(size << 18)
    del held
    meter.step_ended(training=True)
    meter.epoch_ended()
meter.epoch_ended()
held = torch.ones(16 << 18)
del held
print(meter.epoch_ended().device_bytes - baseline, meter.peak_bytes() - baseline)
"""


def test_no_peak_is_lost_between_readings_on_the_cpu() -> None:
    """64 MiB touched and given back before a reading, which starts the kernel's count anew.

    In a process of its own, since this one takes and gives back what other tests need; ± 8 MiB.
    """
    command = [sys.executable, "-P", "-c", TOUCHES_AND_GIVES_BACK]
    last, most = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert last == pytest.approx(16 * MIB, abs=8 * MIB)
    assert most == pytest.approx(64 * MIB, abs=8 * MIB)


def test_samples_are_fifty_milliseconds_apart() -> None:
    meter = CpuMeter()
    started = time.monotonic()
    while time.monotonic() - started < 0.5:
        meter.step_ended(training=False)
    assert 3 <= len(meter.timeline.points) <= 11


def test_what_is_used_on_the_host_before_a_trial_is_the_kernels_figure() -> None:
    """MemTotal - MemAvailable, as `free` shows it, within 256 MiB of what others do meanwhile."""
    used = used_before(torch.device("cpu")).used_bytes
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    assert used == pytest.approx((sizes["MemTotal"] - sizes["MemAvailable"]) * 1024, abs=256 * MIB)
