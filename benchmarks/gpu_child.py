"""The child of `gpu_check.py`: `python -m benchmarks.gpu_child CHANNEL ANSWER` does one job.

The job is read as JSON from the file descriptor CHANNEL (its end of file: nothing to do), the
answer is written to the file ANSWER, aside and renamed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_facts
from benchmarks.gpu_configurations import CONFIGURATIONS, Configuration
from benchmarks.gpu_facts import device_use, used_by_this_process
from tuner.memory.prediction import estimate
from tuner.memory.target_rules import rules_for
from tuner.memory.targets import Target, resolve_target
from tuner.memory.trace import Trace, trace_build
from tuner.profiling import profiled_peak
from tuner.warmup import warm_up

GPU = torch.device("cuda", 0)  # of those that this process sees
_VARIABLES = ("CUDA_", "PYTORCH_", "TORCH_", "CUBLAS", "CUDNN", "NVIDIA_TF32")


def environment(job: dict[str, Any]) -> dict[str, Any]:
    """Return the device that PyTorch can use, and versions."""
    on_gpu = job["device"] != "cpu" and torch.cuda.is_available()
    found: dict[str, Any] = {
        "device": "cuda" if on_gpu else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": None,
        "processor": platform.processor() or platform.machine(),
        "capacity_bytes": None,
        "compute_capability": None,
        "cudnn": None,
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
    }
    if on_gpu:
        properties = torch.cuda.get_device_properties(0)
        found["gpu"], found["capacity_bytes"] = properties.name, properties.total_memory
        found["compute_capability"] = [properties.major, properties.minor]
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def predict(job: dict[str, Any]) -> dict[str, Any]:
    """Trace a configuration on fakes and estimate its peak on the device; the GPU is hidden."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    configuration, target, start = CONFIGURATIONS[job["name"]], _target(job), time.perf_counter()
    trace = trace_build(configuration.build, rules_for(target), configuration.steps)
    found = estimate(trace, target)
    return {
        "allocated_bytes": found.allocated_bytes,
        "reserved_bytes": found.reserved_bytes,
        "required_bytes": found.required_bytes,
        "by_step_bytes": _peaks_by_step(trace, configuration.steps),
        "categories": found.categories,
        "peak_at": None if found.peak_at is None else dataclasses.asdict(found.peak_at),
        "rules": found.rules,
        "notes": found.notes,
        "mix": found.mix,
        "seconds": time.perf_counter() - start,
    }


def _target(job: dict[str, Any]) -> Target:
    if job["device"] == "cpu":
        return resolve_target("cpu")
    major, minor = job["compute_capability"]
    return dataclasses.replace(resolve_target(f"sm_{major}{minor}"), capacity_bytes=job["capacity_bytes"])


def _peaks_by_step(trace: Trace, steps: int) -> list[int]:
    """Return the peak of live bytes in building and in each step, unrounded."""
    peaks, running, step = [0] * (steps + 1), 0, 0
    for event in trace.events:
        block = trace.blocks[max(event, ~event)]
        running += block.bytes if event >= 0 else -block.bytes
        step = max(step, block.step)
        peaks[step] = max(peaks[step], running)
    return peaks


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Run a configuration and return what it took; `out_of_memory` is true where it met the cap.

    `cap_bytes` caps reserved bytes (on a CPU, the growth of the data segment after a warm-up).
    """
    configuration, start = CONFIGURATIONS[job["name"]], time.perf_counter()
    run = _measure_on_cpu if job["device"] == "cpu" else _measure_on_gpu
    try:
        found = run(configuration, job)
    except Exception as error:
        if job.get("cap_bytes") is None or not _is_out_of_memory(error):
            raise
        found = {"out_of_memory": True}
    return {"out_of_memory": False, **found, "seconds": time.perf_counter() - start}


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _measure_on_cpu(configuration: Configuration, job: dict[str, Any]) -> dict[str, Any]:
    device = torch.device("cpu")
    if job.get("cap_bytes") is not None:
        from tuner.measure.meters import CpuMeter

        warm_up(device)
        CpuMeter().cap(job["cap_bytes"], taken_bytes=0)
        _run(configuration, device)
        return {}
    with profiled_peak() as peak:
        _run(configuration, device)
    return {"allocated_bytes": peak.bytes}


def _run(configuration: Configuration, device: torch.device) -> None:
    step = configuration.build(device)
    for _ in range(configuration.steps):
        step()


def _measure_on_gpu(configuration: Configuration, job: dict[str, Any]) -> dict[str, Any]:
    device, others_bytes = GPU, device_use().bytes
    if configuration.warm:
        warm_up(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    if job.get("cap_bytes") is not None:
        fraction = (job["cap_bytes"] + 512) / job["capacity_bytes"]  # the cap survives the rounding
        torch.cuda.set_per_process_memory_fraction(min(1.0, fraction), device)
    if job.get("snapshot"):
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=1_000_000)
    allocated, reserved = [], []

    def note() -> None:
        torch.cuda.synchronize(device)
        allocated.append(torch.cuda.max_memory_allocated(device))
        reserved.append(torch.cuda.max_memory_reserved(device))
        torch.cuda.reset_peak_memory_stats(device)

    step = configuration.build(device)
    note()
    for _ in range(configuration.steps):
        step()
        note()
    if job.get("snapshot"):
        torch.cuda.memory._dump_snapshot(job["snapshot"])
    used = used_by_this_process(others_bytes)
    context_bytes = None if used.bytes is None else used.bytes - torch.cuda.memory_reserved(device)
    statistics = torch.cuda.memory_stats(device)
    return {
        "allocated_bytes": max(allocated),
        "reserved_bytes": max(reserved),
        "device_bytes": None if context_bytes is None else context_bytes + max(reserved),
        "device_source": used.source,
        "context_bytes": context_bytes,
        "by_step_bytes": allocated,
        "reserved_by_step_bytes": reserved,
        "retries": statistics.get("num_alloc_retries"),
    }


def fact(job: dict[str, Any]) -> dict[str, Any]:
    """Measure what the rules assume: rows of what, measured, assumed."""
    return {"rows": gpu_facts.FACTS[job["name"]](GPU)}


JOBS = {"environment": environment, "predict": predict, "measure": measure, "fact": fact}


def main() -> None:
    """Read the job, do it, write the answer."""
    channel, answer = int(sys.argv[1]), Path(sys.argv[2])
    with os.fdopen(channel, encoding="utf-8") as request:
        text = request.read()
    if not text:
        return
    job = json.loads(text)
    try:
        found = JOBS[job["job"]](job)
    except Exception as error:
        traceback.print_exc()
        found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    aside = answer.with_suffix(".tmp")
    aside.write_text(json.dumps(found), encoding="utf-8")
    aside.replace(answer)


if __name__ == "__main__":
    main()
