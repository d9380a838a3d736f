"""Meters read a trial's memory from inside its process, and cap it.

A `Meter` is opened after PyTorch is imported and before the workload is loaded::

    warm up ─► baseline (= context) ─► cap at the reservation ─► phases … ─► peaks
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from tuner.measure import nvml
from tuner.processes import process_memory, reset_peak_resident
from tuner.records import Peaks

if TYPE_CHECKING:
    import torch


class Meter(Protocol):
    """What the worker asks of a meter."""

    current_phase: str

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

    def peak_bytes(self) -> int | None:
        """Return the peak device bytes so far."""

    def peaks(self) -> Peaks:
        """Return all peaks so far."""


def used_by_others(device: torch.device) -> int | None:
    """Return the device bytes in use before this process touches the device; None on a CPU."""
    return nvml.device_use(_visible_device()).bytes if device.type == "cuda" else None


def open_meter(device: torch.device, others_bytes: int | None) -> Meter:
    """Return the meter for a device, its baseline read; call it after a warm-up.

    Args:
        device: The device.
        others_bytes: What `used_by_others` gave before the warm-up.
    """
    return CudaMeter(device, others_bytes) if device.type == "cuda" else CpuMeter()


def _visible_device() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0")


class CpuMeter:
    """Resident bytes of this process, from `/proc`; the cap is `RLIMIT_DATA`.

    The peak is `VmHWM`, reset at the baseline and at each phase's start. The limit counts pages
    that were asked for but not touched, so it is set anew (`cap`) when the study's imports and
    data are in: what they reserved without using is not charged. Loader workers inherit it, one
    each.
    """

    def __init__(self) -> None:
        self.current_phase = "start"
        self._phases: dict[str, int] = {}
        reset_peak_resident()
        memory = process_memory()
        self._baseline_bytes = None if memory is None else memory.resident_bytes
        self._usual_limit = resource.getrlimit(resource.RLIMIT_DATA)

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
        resource.setrlimit(resource.RLIMIT_DATA, (memory.data_bytes + allowed_bytes, hard))

    def lift_cap(self) -> None:
        """Undo `cap`."""
        resource.setrlimit(resource.RLIMIT_DATA, self._usual_limit)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute the peak of what follows to a phase."""
        outer, self.current_phase = self.current_phase, name
        self._note(outer)
        reset_peak_resident()
        try:
            yield
        finally:
            self._note(name)
            reset_peak_resident()
        self.current_phase = outer  # an exception leaves the phase it was raised in

    def peak_bytes(self) -> int | None:
        """Return the peak resident bytes so far."""
        self._note(self.current_phase)
        return max(self._phases.values(), default=None)

    def peaks(self) -> Peaks:
        """Return all peaks so far."""
        return Peaks(
            device_bytes=self.peak_bytes(),
            source="VmHWM",
            baseline_bytes=self._baseline_bytes,
            phases={name: size for name, size in self._phases.items() if name != "start"},
        )

    def _note(self, phase: str) -> None:
        memory = process_memory()
        if memory is not None:
            self._phases[phase] = max(self._phases.get(phase, 0), memory.peak_resident_bytes)


class CudaMeter:
    """PyTorch's statistics of one CUDA device, and NVML for what they do not see.

    Device bytes are the context (NVML's figure for this process at the baseline, less the
    allocator's segments) plus the peak of reserved bytes; the cap is PyTorch's per-process
    memory fraction, which limits reserved bytes, so the context is subtracted from it. Where NVML
    does not know this process (a container), its use is what the device's grew by.
    """

    def __init__(self, device: torch.device, others_bytes: int | None) -> None:
        import torch

        self.current_phase = "start"
        self._device = device
        self._phases: dict[str, int] = {}
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        reserved_bytes = torch.cuda.memory_reserved(device)
        self._total_bytes = torch.cuda.get_device_properties(device).total_memory
        used = nvml.process_use(_visible_device(), os.getpid())
        if used.source == nvml.DEVICE_WIDE:
            used = nvml.grown_since(others_bytes, used)
        self._context_bytes = max(0, used.bytes - reserved_bytes) if used.bytes is not None else None
        self._source = f"{used.source} + torch.cuda reserved"
        torch.cuda.reset_peak_memory_stats(device)
        self._allocated_peak = 0

    def cap(self, reservation_bytes: int, taken_bytes: int | None = None) -> None:
        """Limit what the caching allocator may reserve."""
        import torch

        taken_bytes = (self._context_bytes or 0) if taken_bytes is None else taken_bytes
        allowed_bytes = max(0, reservation_bytes - taken_bytes)
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed_bytes / self._total_bytes), self._device)

    def lift_cap(self) -> None:
        """Undo `cap`."""
        import torch

        torch.cuda.set_per_process_memory_fraction(1.0, self._device)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute the peak of what follows to a phase."""
        import torch

        outer, self.current_phase = self.current_phase, name
        self._note(outer)
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
        finally:
            self._note(name)
            torch.cuda.reset_peak_memory_stats(self._device)
        self.current_phase = outer

    def peak_bytes(self) -> int | None:
        """Return the peak device bytes so far."""
        self._note(self.current_phase)
        return max(self._phases.values(), default=0) + (self._context_bytes or 0)

    def peaks(self) -> Peaks:
        """Return all peaks so far."""
        device_bytes = self.peak_bytes()
        return Peaks(
            device_bytes=device_bytes,
            source=self._source,
            allocated_bytes=self._allocated_peak,
            reserved_bytes=max(self._phases.values(), default=0),
            baseline_bytes=self._context_bytes,
            phases={
                name: size + (self._context_bytes or 0)
                for name, size in self._phases.items()
                if name != "start"
            },
        )

    def _note(self, phase: str) -> None:
        import torch

        reserved_bytes = torch.cuda.max_memory_reserved(self._device)
        self._phases[phase] = max(self._phases.get(phase, 0), reserved_bytes)
        self._allocated_peak = max(self._allocated_peak, torch.cuda.max_memory_allocated(self._device))
