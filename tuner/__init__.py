"""Hyperparameter search under a GPU-memory budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.memory.peak import predict_peak as predict_peak
    from tuner.records import Prediction as Prediction
    from tuner.search.gate import MemoryGate as MemoryGate
    from tuner.workload import Loaders as Loaders
    from tuner.workload import Maximize as Maximize
    from tuner.workload import Minimize as Minimize
    from tuner.workload import Workload as Workload

__version__ = "0.1.0"

# Names are imported when first used: `tuner --help` must not wait for PyTorch.
_HOMES = {
    "Workload": "tuner.workload",
    "Loaders": "tuner.workload",
    "Maximize": "tuner.workload",
    "Minimize": "tuner.workload",
    "Prediction": "tuner.records",
    "MemoryGate": "tuner.search.gate",
    "predict_peak": "tuner.memory.peak",
}
__all__ = ["Loaders", "Maximize", "MemoryGate", "Minimize", "Prediction", "Workload", "predict_peak"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tuner' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
