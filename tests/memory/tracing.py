"""Traces for the real cases: peaks of each step, and what a trace holds beside the tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from tests.models import Build
from tuner.memory.cuda_rules import CudaDevice, cuda_rules
from tuner.memory.prediction import Estimate, estimate
from tuner.memory.recorder import Block
from tuner.memory.targets import resolve_target
from tuner.memory.trace import Trace, trace_build
from tuner.units import MIB

NO_WORKSPACES = CudaDevice(cublas_workspace_bytes=0)


def tensors_on_cuda(build: Build, steps: int = 3) -> Trace:
    """Trace steps on CUDA without the workspaces of cuBLAS and cuDNN: the cases' figures leave them out."""
    trace = trace_build(build, cuda_rules(NO_WORKSPACES), steps)
    hidden = {
        index
        for index, block in enumerate(trace.blocks)
        if block.category == "workspace" and "convolution" in block.operator
    }
    events = tuple(event for event in trace.events if max(event, ~event) not in hidden)
    return dataclasses.replace(trace, events=events)


def estimated(trace: Trace) -> Estimate:
    """Return the estimate of a trace on CUDA's allocator."""
    return estimate(trace, resolve_target("cuda"))


def mib_of_steps(trace: Trace) -> list[float]:
    """Return the allocated peak of each training step in MiB."""
    peaks = _mib_by(trace, lambda block: block.step)
    return [peaks[step] for step in sorted(peaks) if step > 0]


def mib_of_phases(trace: Trace) -> dict[str, float]:
    """Return the allocated peaks in MiB of `setup`, `train` and `eval`, in the order they begin."""
    phases = {"setup": "setup", "eval": "eval"}
    return _mib_by(trace, lambda block: phases.get(block.phase, "train" if block.step else "eval"))


def _mib_by(trace: Trace, group_of: Callable[[Block], Any]) -> dict[Any, float]:
    """Return the peak in MiB while each group's blocks are made; requests rounded up to 512 bytes."""
    peaks: dict[Any, float] = {}
    live, group = 0, None
    for event in trace.events:
        block = trace.blocks[max(event, ~event)]
        size = -(-block.bytes // 512) * 512
        live += size if event >= 0 else -size
        group = group_of(block) if event >= 0 else group
        peaks[group] = max(peaks.get(group, 0.0), live / MIB)
    return peaks


def images(batch: int) -> torch.Tensor:
    """Return images [batch, 3, 224, 224]."""
    return torch.empty(batch, 3, 224, 224)
