"""The meter of a CUDA device, read from inside the trial's process."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from tuner.measure import nvml
from tuner.measure.meters import visible_device
from tuner.measure.nvml import Before
from tuner.measure.phases import PhaseMeter, Reading
from tuner.records import Peaks

if TYPE_CHECKING:
    import torch

# What PyTorch's counters say at the end of a step has no noise: 64 of its smallest blocks are growth.
_LEAST_GROWTH_BYTES = 64 * 512
_DEVICE_WIDE_SECONDS = 1.0  # between two looks at the whole device: each opens NVML anew


class CudaMeter(PhaseMeter):
    """PyTorch's statistics of one CUDA device, and NVML for what they do not see.

    Device bytes are the context plus the peak of reserved bytes; the cap is PyTorch's per-process
    memory fraction, which limits reserved bytes, so the context is subtracted from it. Statistics
    are kept on the host: reading them waits for no kernel.

    The context is, as far as it can be known: NVML's figure for this process less the allocator's
    segments; what the caller takes it to be; what the device's use grew by, where nobody else is
    on it. Where it is none of these, device bytes are unknown, and phases and timeline show
    reserved bytes alone.

    Where NVML does not know this process, the peak use of the whole device is kept beside
    (`device_wide_bytes`): other processes are in it, and nothing is computed from it.
    """

    def __init__(
        self,
        device: torch.device,
        before: Before,
        *,
        context_bytes: int | None = None,
        among_others: bool = False,
    ) -> None:
        import torch

        super().__init__(_LEAST_GROWTH_BYTES)
        self._device, self._before = device, before
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        reserved_bytes = torch.cuda.memory_reserved(device)
        self._total_bytes = torch.cuda.get_device_properties(device).total_memory
        self._device_wide_bytes: int | None = None
        self._next_look = 0.0
        own = self._own_use(reserved_bytes)
        self._knows_own = own is not None
        source = nvml.THIS_PROCESS
        if own is None and context_bytes is not None:
            own, source = context_bytes + reserved_bytes, "the study's context"
        elif own is None and (among_others or not before.shared):
            grown = nvml.grown_since(before.used_bytes, nvml.device_use(visible_device()))
            own, source = grown.bytes, grown.source
        self._context_bytes = None if own is None else max(0, own - reserved_bytes)
        self._source = (
            "torch.cuda reserved, context unknown" if own is None else f"{source} + torch.cuda reserved"
        )
        torch.cuda.reset_peak_memory_stats(device)

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

    def epoch_ended(self) -> Reading:
        """Return the peaks since the last call."""
        self._look_device_wide()
        return super().epoch_ended()

    def peaks(self) -> Peaks:
        """Return all peaks so far."""
        self._look_device_wide()
        peak = self._peak()
        return Peaks(
            device_bytes=peak.device_bytes,
            source=self._source,
            allocated_bytes=peak.allocated_bytes,
            reserved_bytes=peak.reserved_bytes,
            baseline_bytes=self._context_bytes,
            phases=self._phase_bytes(),
            used_before_bytes=self._before.used_bytes,
            device_wide_bytes=self._device_wide_bytes,
        )

    def warnings(self) -> list[str]:
        """Return what was noticed, a sentence each."""
        unknown = "device bytes are unknown: NVML does not say what this process uses, and it is not alone"
        return [*super().warnings(), *([unknown] if self._context_bytes is None else [])]

    def _own_use(self, reserved_bytes: int) -> int | None:
        """Return what NVML says of this process, or None where it says nothing, or of another one.

        A number that was on the list before this process touched the device, or a figure below
        what this process holds for certain, is another process's of another PID namespace.
        """
        used = nvml.process_use(visible_device(), os.getpid())
        if used.source != nvml.THIS_PROCESS or used.bytes is None or self._before.listed:
            return None
        return used.bytes if used.bytes >= reserved_bytes else None

    def _look_device_wide(self) -> None:
        if self._knows_own or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _DEVICE_WIDE_SECONDS
        used_bytes = nvml.device_use(visible_device()).bytes
        if used_bytes is not None:
            self._device_wide_bytes = max(used_bytes, self._device_wide_bytes or 0)

    def _read(self) -> Reading | None:
        import torch

        statistics = torch.cuda.memory_stats_as_nested_dict(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        reserved_bytes = _of(statistics, "reserved_bytes", "peak")
        allocated_bytes = _of(statistics, "allocated_bytes", "peak")
        context_bytes = self._context_bytes
        device_bytes = None if context_bytes is None else context_bytes + reserved_bytes
        return Reading(device_bytes, allocated_bytes, reserved_bytes)

    def _held_bytes(self) -> int | None:
        import torch

        return _of(torch.cuda.memory_stats_as_nested_dict(self._device), "allocated_bytes", "current")


def _of(statistics: dict[str, Any], name: str, which: str) -> int:
    """Return one of PyTorch's statistics; there is none before the first allocation."""
    return int(statistics[name]["all"][which]) if statistics else 0
