"""NVML in this process: the real pynvml, with the compiled stand-in as the driver's library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

Driver = Callable[..., None]


@pytest.fixture
def driver(nvml_library: str, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Set what the stand-in answers: `driver(NAME=…, MEMORY=…)`; at first, an A100 with 1,012 MiB in use."""
    library = str(Path(nvml_library) / "libnvidia-ml.so.1")
    monkeypatch.setattr(pynvml, "CDLL", lambda name: ctypes.CDLL(library))
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def answer(**values: object) -> None:
        for name, value in values.items():
            monkeypatch.setenv(f"NVML_STAND_IN_{name}", str(value))

    answer(NAME="NVIDIA A100-SXM4-40GB", CAPABILITY=80, TOTAL=40960 << 20, USED=1012 << 20)
    return answer
