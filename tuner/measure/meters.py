"""Meters read a trial's memory from inside its process, and cap it.

A `Meter` is opened after PyTorch is imported and before the workload is loaded::

    used_before ─► warm up ─► baseline (= context) ─► cap at the reservation ─► phases … ─► peaks
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tuner.measure import nvml
from tuner.measure.nvml import Before
from tuner.measure.phases import PhaseMeter, Reading
from tuner.measure.timeline import Timeline
from tuner.processes import process_memory, reset_peak_resident
from tuner.records import Peaks
from tuner.units import MIB

if TYPE_CHECKING:
    import torch

# Resident bytes of flat runs (MLP, CNN, transformer, LSTM) rise by 0.01 to 0.1 MiB in 225 to 2,700
# steady steps; those of an MLP with a running total of losses, by 7 MiB in 750.
_LEAST_GROWTH_BYTES = MIB
# What RLIMIT_DATA counts beyond what becomes resident: the stack of a thread that starts in training
# (8 MiB, of which it touches some pages), ends of heaps. Measured as the smallest limit that does
# less the resident peak, with one thread and with two: 2 to 9 MiB on studies/digits_cnn.py, -6 to -3
# on studies/char_gpt.py, -5 to 3 on the models of benchmarks/zoo.py, LSTMs left out: what oneDNN asks
# for there and leaves untouched (26 and 66 MiB) is predicted. Below zero is code that is touched in
# training for the first time: resident, never limited.
# A reservation on a CPU is larger by this.
UNTOUCHED_BYTES = 12 * MIB


class Meter(Protocol):
    """What the worker asks of a meter."""

    current_phase: str
    timeline: Timeline

    def cap(self, reservation_bytes: int, taken_bytes: int | None = None) -> None:
        """Let this process take no more than `reservation_bytes` on the device.

        Args:
            reservation_bytes: The cap, context included.
            taken_bytes: What counts as taken already; None: what is measured.
        """

    def lift_cap(self) -> None:
        """Undo `cap`."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Attribute the peak of what follows to a phase."""

    def step_ended(self, *, training: bool, new_shape: bool = False) -> None:
        """Note the end of a step.

        Args:
            training: Whether it was a training step.
            new_shape: Whether its batch had a shape that no batch before it had.
        """

    def epoch_ended(self) -> Reading:
        """Return the peaks since the last call."""

    def growth_bytes(self) -> int | None:
        """Return what each further training step left behind; None when there were too few."""

    def warnings(self) -> list[str]:
        """Return what was noticed, a sentence each."""

    def peak_bytes(self) -> int | None:
        """Return the peak device bytes so far."""

    def peaks(self) -> Peaks:
        """Return all peaks so far."""


def used_before(device: torch.device) -> Before:
    """Return what is on the device before this process touches it.

    On a CPU that is the host's memory that is not available, this process's imports included.
    """
    if device.type == "cuda":
        return nvml.before_use(visible_device(), os.getpid())
    return Before(_used_host_bytes())


def open_meter(
    device: torch.device, before: Before, *, context_bytes: int | None = None, among_others: bool = False
) -> Meter:
    """Return the meter for a device, its baseline read; call it after a warm-up.

    Args:
        device: The device.
        before: What `used_before` gave before the warm-up.
        context_bytes: On CUDA, what the context is taken to be where NVML does not say what this
            process uses.
        among_others: On CUDA, take the growth of the device's use for this process's own even where
            others are on the device.
    """
    if device.type == "cpu":
        return CpuMeter(before)
    from tuner.measure.cuda_meter import CudaMeter

    return CudaMeter(device, before, context_bytes=context_bytes, among_others=among_others)


def visible_device() -> str:
    """Return the value of CUDA_VISIBLE_DEVICES whose first entry is this process's device."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0")


def _used_host_bytes() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    sizes = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", text, re.MULTILINE))
    if len(sizes) < 2:
        return None
    return (int(sizes["MemTotal"]) - int(sizes["MemAvailable"])) * 1024


class CpuMeter(PhaseMeter):
    """Resident bytes of this process, from `/proc`; the cap is `RLIMIT_DATA`.

    A reading is `VmHWM`, which is then started anew (where the kernel does not allow that, it is
    the peak of all that went before). The limit counts pages that were asked for but not touched,
    so it is set anew (`cap`) when the study's imports and data are in: what they reserved without
    using is not charged; what training does so is allowed for in the reservation (UNTOUCHED_BYTES).
    Code that is touched for the first time is resident and never limited: up to 6 MiB more than the
    reservation. Loader workers inherit the limit, one each.
    """

    def __init__(self, before: Before | None = None) -> None:
        super().__init__(_LEAST_GROWTH_BYTES)
        self._used_before_bytes = None if before is None else before.used_bytes
        reset_peak_resident()
        memory = process_memory()
        self._baseline_bytes = None if memory is None else memory.resident_bytes
        self._usual_limit = resource.getrlimit(resource.RLIMIT_DATA)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._statm: int | None = None
        with contextlib.suppress(OSError):
            self._statm = os.open("/proc/self/statm", os.O_RDONLY)  # kept open: a read takes 1 µs, not 11

    def cap(self, reservation_bytes: int, taken_bytes: int | None = None) -> None:
        """Let the data segment grow by the reservation less what is taken already.

        Raises:
            MemoryError: More than the reservation is resident already.
        """
        memory = process_memory()
        if memory is None:
            return
        taken_bytes = memory.resident_bytes if taken_bytes is None else taken_bytes
        allowed_bytes = reservation_bytes - taken_bytes
        if allowed_bytes <= 0:
            raise MemoryError(
                f"{taken_bytes} bytes are resident before training, the reservation is {reservation_bytes}"
            )
        _, hard = self._usual_limit
        limit_bytes = memory.data_bytes + allowed_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))

    def lift_cap(self) -> None:
        """Undo `cap`."""
        resource.setrlimit(resource.RLIMIT_DATA, self._usual_limit)

    def peaks(self) -> Peaks:
        """Return all peaks so far."""
        return Peaks(
            device_bytes=self.peak_bytes(),
            source="VmHWM",
            baseline_bytes=self._baseline_bytes,
            phases=self._phase_bytes(),
            used_before_bytes=self._used_before_bytes,
        )

    def _read(self) -> Reading | None:
        memory = process_memory()
        reset_peak_resident()
        return None if memory is None else Reading(memory.peak_resident_bytes)

    def _held_bytes(self) -> int | None:
        if self._statm is None:
            return None
        return int(os.pread(self._statm, 64, 0).split()[1]) * self._page_bytes
