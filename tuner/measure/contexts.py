"""The CUDA context of this host's GPUs: measured once in a child process, kept in a state file.

::

    doctor ──► ContextProbe.measure(device) ──► MeasuredContext ──► contexts.json
                                                                        └──► target `cuda`

The child (context_child.py) warms up as a trial does, so that the figure is what a trial's
baseline will be. It holds for one host, device, driver and build of PyTorch; another is measured anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from tuner.errors import TunerError
from tuner.measure.nvml import Device
from tuner.processes import Child
from tuner.units import MIB

_FILE_VERSION = 1
_CHILD = (sys.executable, "-P", "-m", "tuner.measure.context_child")
_CHILD_SECONDS = 180.0
# A run loads 14 to 18 MiB of libraries after its first step (reference/nvml_rows_HOW.md).
_SPREAD_BYTES = 16 * MIB
# The growth of a device's use counts what others took meanwhile.
_SPREAD_BY_GROWTH_BYTES = 64 * MIB


class MeasurementError(TunerError):
    """The context could not be measured; the message is the reason."""


@dataclass(frozen=True)
class ContextKey:
    """What a measured context holds for."""

    host: str
    uuid: str
    driver: str
    torch: str


@dataclass(frozen=True)
class MeasuredContext:
    """What a process takes on a GPU beyond the allocator's segments.

    Attributes:
        context_bytes: Device bytes by NVML less what the allocator reserved, after a warm-up.
        total_bytes: All the memory that PyTorch can get on the device.
        source: How NVML gave the figure: for the process, or as the growth of the device's use.
    """

    context_bytes: int
    total_bytes: int
    source: str

    @property
    def spread_bytes(self) -> int:
        """One standard deviation of the context."""
        return _SPREAD_BY_GROWTH_BYTES if "growth" in self.source else _SPREAD_BYTES


class ContextProbe(Protocol):
    """Measures the context of a GPU that is present."""

    def measure(self, device: Device) -> MeasuredContext:
        """Measure the context of one device.

        Raises:
            MeasurementError: It cannot be measured.
        """


class ChildProbe:
    """Measures in a child process that sees only the device: this process never opens CUDA.

    Args:
        command: The child; it writes a `MeasuredContext` as JSON to the file descriptor that is
            added to its arguments.
        timeout_seconds: How long it may take.
    """

    def __init__(self, command: Sequence[str] = _CHILD, timeout_seconds: float = _CHILD_SECONDS) -> None:
        self._command, self._timeout_seconds = command, timeout_seconds

    def measure(self, device: Device) -> MeasuredContext:
        """Start the child and return what it reports.

        Raises:
            MeasurementError: The child failed, or took too long.
        """
        reading, writing = os.pipe()
        with tempfile.TemporaryDirectory() as folder, os.fdopen(reading, "rb") as answers:
            log = Path(folder) / "log.txt"
            child = Child(
                [*self._command, str(writing)],
                log=log,
                environment={"CUDA_VISIBLE_DEVICES": device.uuid},
                channels=(writing,),
            )
            os.close(writing)
            ended = child.wait(self._timeout_seconds)
            child.kill()
            answer = answers.read()
            words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if ended is None:
            raise MeasurementError(f"no answer within {self._timeout_seconds:.0f} s")
        if not answer:
            raise MeasurementError(words[-1][:300] if words else f"the process ended with code {ended.code}")
        return MeasuredContext(**json.loads(answer))


class ContextStore:
    """The measured contexts of this user, in one JSON file.

    A file that cannot be read, or that another version wrote, counts as empty.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.path = (folder or state_folder()) / "contexts.json"

    def get(self, key: ContextKey) -> MeasuredContext | None:
        """Return what was measured for a key, or None."""
        for entry in self._entries():
            if entry.get("key") == asdict(key):
                with contextlib.suppress(KeyError, TypeError):
                    return MeasuredContext(**entry["context"])
        return None

    def put(self, key: ContextKey, measured: MeasuredContext) -> None:
        """Keep what was measured, in place of what was there for this device of this host."""
        others = [
            entry
            for entry in self._entries()
            if (entry["key"].get("host"), entry["key"].get("uuid")) != (key.host, key.uuid)
        ]
        contexts = [*others, {"key": asdict(key), "context": asdict(measured)}]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_suffix(f".{os.getpid()}.tmp")
        aside.write_text(json.dumps({"version": _FILE_VERSION, "contexts": contexts}, indent=2), "utf-8")
        aside.replace(self.path)

    def _entries(self) -> list[dict[str, Any]]:
        try:
            held = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        if not isinstance(held, dict) or held.get("version") != _FILE_VERSION:
            return []
        entries = held.get("contexts")
        if not isinstance(entries, list):
            return []
        return [e for e in entries if isinstance(e, dict) and isinstance(e.get("key"), dict)]


def context_key(device: Device, driver: str | None) -> ContextKey:
    """Return what a context measured now holds for."""
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = ""
    return ContextKey(socket.gethostname(), device.uuid, driver or "", torch_version)


def state_folder() -> Path:
    """Return where what is known of this host is kept: `TUNER_STATE_DIR`, else the XDG state folder."""
    if own := os.environ.get("TUNER_STATE_DIR"):
        return Path(own)
    state = os.environ.get("XDG_STATE_HOME")  # to be ignored unless absolute, says the XDG standard
    base = Path(state) if state and Path(state).is_absolute() else Path.home() / ".local" / "state"
    return base / "vram-tuner"
