"""Under which conditions a driver ran: what one needs to run its trials again, and to see what changed.

Kept once per driver, in `tuner_driver.environment`. What differs from trial to trial (threads,
seed, device, the study file as the process loaded it) is in `tuner_trial`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tuner
from tuner.measure import nvml
from tuner.memory.targets import Target
from tuner.scheduling.devices import choose_places
from tuner.search.git import revision_of
from tuner.store.masking import masked
from tuner.store.rows import StudyRecord, storable_text

if TYPE_CHECKING:
    from tuner.search.plan import Plan

VERSION = 1
_PACKAGES = ("torch", "numpy", "optuna", "sqlalchemy")
# What changes figures from outside: devices, the allocator's options, threads, deterministic cuBLAS.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTHONHASHSEED",
)


def driver_environment(plan: Plan) -> dict[str, Any]:
    """Return the environment of this process as the driver of `plan`, ready for JSON.

    Keys: `version`, `command` (the command line, a list), `cwd`, `host`, `platform`, `processor`,
    `python`, `packages` (name → version, None where it is not installed), `gpu_driver`, `gpus`,
    `gpu_problem`, `variables`, `study_file`, `workload_digest`, `git` (a `Revision`, or None) and
    `settings` (name → value and origin).

    Nothing in it holds a secret of the storage URL. It imports no PyTorch, touches no device, takes
    a few milliseconds (more where git is slow, seconds at most) and never fails.
    """
    file = study_file(plan.loaded.reference)
    found = {
        "version": VERSION,
        "command": ["tuner", *sys.argv[1:]],
        "cwd": _cwd(),
        **host_environment(),
        "study_file": None if file is None else str(file),
        "workload_digest": plan.loaded.digest,
        "git": git_state(file),
        "settings": {name: setting.to_json() for name, setting in plan.settings.items()},
    }
    cleaned: dict[str, Any] = _encodable(masked(found, plan.url))
    return cleaned


def host_environment() -> dict[str, Any]:
    """Return host, versions, GPUs and variables: `host` to `variables` of `driver_environment`."""
    devices = nvml.devices()
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "processor": choose_places("cpu")[0].name,
        "python": platform.python_version(),
        "packages": {"tuner": tuner.__version__, **{name: _version(name) for name in _PACKAGES}},
        "gpu_driver": devices.driver,
        "gpus": [
            {"index": gpu.index, "uuid": gpu.uuid, "name": gpu.name, "total_bytes": gpu.total_bytes}
            for gpu in devices.found
        ],
        "gpu_problem": devices.problem,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def given_context_bytes(study: StudyRecord, target: Target) -> int | None:
    """Return the context that a trial of the study is told, see `Request.context_bytes`.

    On a CPU a seeded study's, and None without a seed; on a GPU what is known of the card.
    """
    if target.kind == "cpu":
        return None if study.seed is None else study.context_bytes
    return target.context_bytes


def git_state(file: Path | None) -> dict[str, Any] | None:
    """Return the state of the repository that holds the study file, or None."""
    revision = None if file is None else revision_of(file)
    return None if revision is None else revision.to_json()


def study_file(reference: str) -> Path | None:
    """Return the file that a workload's reference means, without importing it; None if it is gone.

    For `package.module:Class`, the packages above the module are imported, and the current folder
    is searched as well, as loading it does.
    """
    place = reference.rpartition(":")[0]
    if "/" in place:
        return Path(place) if Path(place).is_file() else None
    if _cwd() not in sys.path:
        sys.path.append(_cwd())
    try:
        spec = importlib.util.find_spec(place)
    except Exception:  # whatever importing a package above it raises
        return None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def digest_of(file: Path | None) -> str | None:
    """Return the SHA-256 of a study file as a study remembers it; None when it cannot be read."""
    try:
        return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def _cwd() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return ""


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _encodable(value: Any) -> Any:
    """Return a value whose texts both databases hold: arguments and paths need not be Unicode."""
    if isinstance(value, dict):
        return {key: _encodable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    return storable_text(value) if isinstance(value, str) else value
