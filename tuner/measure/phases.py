"""What the meters of both kinds of device share: peaks by phase, by epoch and over time."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from tuner.measure.growth import StepSizes
from tuner.measure.timeline import Point, Timeline
from tuner.units import format_bytes

# A reading costs 0.07 ms on a CPU (one of /proc/self/status and a write to clear_refs), so that at
# this interval readings take about 0.1 % of the time.
SAMPLE_SECONDS = 0.05


@dataclass(frozen=True)
class Reading:
    """The peak since the reading before this one; what is not known is None.

    Attributes:
        device_bytes: Resident bytes on a CPU; context and segments on CUDA.
        allocated_bytes: Live blocks; CUDA only.
        reserved_bytes: Segments; CUDA only.
    """

    device_bytes: int | None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None

    @property
    def shown_bytes(self) -> int:
        """What phases and the timeline show: segments alone where the context is not known."""
        return self.device_bytes or self.reserved_bytes or 0

    def joined(self, other: Reading | None) -> Reading:
        """Return the peak of both."""
        if other is None:
            return self
        return Reading(
            _max(self.device_bytes, other.device_bytes),
            _max(self.allocated_bytes, other.allocated_bytes),
            _max(self.reserved_bytes, other.reserved_bytes),
        )


class PhaseMeter(ABC):
    """Keeps peaks; a meter says how one reading is taken.

    Each reading starts the device's own peak counter anew, so that no peak is lost between two of
    them, however far apart they are.

    Attributes:
        current_phase: What the trial is doing.
        timeline: Readings over time.
    """

    def __init__(self, least_growth_bytes: int) -> None:
        self.current_phase = "start"
        self.timeline = Timeline()
        self._step_sizes = StepSizes(least_growth_bytes)
        self._started = time.monotonic()
        self._next_sample = 0.0
        self._phases: dict[str, Reading] = {}
        self._epoch: Reading | None = None

    @abstractmethod
    def _read(self) -> Reading | None:
        """Return the peak since the last call and start anew; None where it cannot be known."""

    @abstractmethod
    def _held_bytes(self) -> int | None:
        """Return what the trial's data holds now, cheap enough for every step."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute the peak of what follows to a phase."""
        self._note(self.current_phase)
        outer, self.current_phase = self.current_phase, name
        try:
            yield
        finally:
            self._note(name)
        self.current_phase = outer  # an exception leaves the phase it was raised in

    def step_ended(self, *, training: bool, new_shape: bool = False) -> None:
        """Note the end of a training or evaluation step."""
        if training:
            self._step_sizes.step(self._held_bytes, new_shape=new_shape)
        if time.monotonic() >= self._next_sample:
            self._note(self.current_phase)

    def epoch_ended(self) -> Reading:
        """Return the peaks since the last call."""
        self._note(self.current_phase)
        self._step_sizes.epoch_ended()
        ended, self._epoch = self._epoch, None
        return ended or Reading(None)

    def growth_bytes(self) -> int | None:
        """Return what each further training step left behind; None when there were too few."""
        return self._step_sizes.growth_bytes()

    def warnings(self) -> list[str]:
        """Return what was noticed, a sentence each."""
        growth_bytes = self.growth_bytes()
        return [f"memory grows by {format_bytes(growth_bytes)} per training step"] if growth_bytes else []

    def _note(self, phase: str) -> None:
        reading = self._read()
        now = time.monotonic()
        self._next_sample = now + SAMPLE_SECONDS
        if reading is None:
            return
        self._phases[phase] = reading.joined(self._phases.get(phase))
        self._epoch = reading.joined(self._epoch)
        self.timeline.add(Point(round(now - self._started, 3), reading.shown_bytes, phase))

    def peak_bytes(self) -> int | None:
        """Return the peak device bytes so far."""
        return self._peak().device_bytes

    def _peak(self) -> Reading:
        """Return the peak of all phases, up to now."""
        self._note(self.current_phase)
        peak = Reading(None)
        for reading in self._phases.values():
            peak = reading.joined(peak)
        return peak

    def _phase_bytes(self) -> dict[str, int]:
        return {name: reading.shown_bytes for name, reading in self._phases.items() if name != "start"}


def _max(*values: int | None) -> int | None:
    return max((value for value in values if value is not None), default=None)
