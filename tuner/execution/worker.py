"""The process that trains one trial: `python -m tuner.execution.worker CHANNEL [STUDY]`.

It imports PyTorch (and the study, where one is named) first and then reads the path of its run
folder from the file descriptor CHANNEL, so that the driver can have a process ready while another
trial runs. One process, one trial.

Runs with nothing but PyTorch, nvidia-ml-py and the standard library (and what the study imports).
A failure of the workload is a result, written to `report.json`; exit code 0 means that a report
was written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tuner
from tuner.execution.failures import classify
from tuner.execution.fit import Run, StopRequested, default_fit
from tuner.execution.run_folder import Request, RunFolder
from tuner.measure.meters import Meter, open_meter, used_before
from tuner.measure.profile import allocated_peak
from tuner.records import EpochMetrics, Failure, Outcome, TrialResult
from tuner.units import format_bytes
from tuner.warmup import warm_up
from tuner.workload import LoadedWorkload, Workload, load_workload


def main(channel: int, study: str | None) -> None:
    """Wait for a run folder, run the trial that it describes, and report."""
    import torch

    loaded = None
    if study is not None:
        with contextlib.suppress(Exception):  # the trial loads it again, and reports what is wrong
            loaded = load_workload(study)
    with os.fdopen(channel, encoding="utf-8") as paths:
        path = paths.readline().rstrip("\n")
    if not path:
        return  # the driver needs no further trial
    folder = RunFolder(Path(path))
    request = folder.read_request()
    if request.visible_device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = request.visible_device  # CUDA reads it at its first use
    started = time.monotonic()
    torch.set_num_threads(request.threads)
    device = torch.device(request.device)
    before = used_before(device)
    warm_up(device)
    meter = open_meter(device, before, context_bytes=request.context_bytes)
    folder.append_event("baseline", **meter.peaks().to_json())
    result = _Trial(request, folder, device, meter, loaded).run()
    folder.write_report({**result.to_json(), "seconds": time.monotonic() - started})


class _Trial:
    """One trial from request to result."""

    def __init__(
        self, request: Request, folder: RunFolder, device: Any, meter: Meter, loaded: LoadedWorkload | None
    ) -> None:
        self._request, self._folder, self._device, self._meter = request, folder, device, meter
        self._loaded = loaded
        self._run: Run | None = None

    def run(self) -> TrialResult:
        """Train under the cap; whatever the workload raises becomes a result."""
        try:
            self._cap()
            workload = self._train()
        except StopRequested as stop:
            return self._result(stop.request.outcome, Failure(stop.request.reason))
        except BaseException as error:  # sys.exit() and KeyboardInterrupt in a workload end it too
            with contextlib.suppress(RuntimeError):  # a device in error answers nothing any more
                self._meter.lift_cap()  # writing the report must not fail for want of memory
            capped = self._device.type == "cpu" and self._request.reservation_bytes is not None
            outcome, failure = classify(error, self._device, self._meter.current_phase, capped=capped)
            return self._result(outcome, failure)
        self._meter.lift_cap()
        result = self._completed(workload)
        if self._device.type == "cpu":
            self._folder.write_report(result.to_json())  # whatever the profile does, this is kept
            return self._with_profile(result, workload)
        return result

    def _cap(self, taken_bytes: int | None = None) -> None:
        if self._request.reservation_bytes is not None:
            self._meter.cap(self._request.reservation_bytes, taken_bytes)

    def _train(self) -> Workload:
        request = self._request
        with self._meter.phase("data"):
            self._loaded = self._loaded or load_workload(request.workload)
            workload = self._loaded.workload
            if request.seed is not None:
                _seed(request.seed)
            loaders = workload.open_loaders(request.params)
        self._cap(request.context_bytes if self._device.type == "cpu" else None)  # a GPU's is the meter's
        with self._meter.phase("setup"):
            state = workload.setup(request.params, self._device)
        self._run = Run(
            workload,
            request.params,
            self._device,
            state=state,
            loaders=loaders,
            folder=self._folder,
            meter=self._meter,
        )
        fit = workload.own_fit or default_fit
        fit(self._run)
        return workload

    def _completed(self, workload: Workload) -> TrialResult:
        best = self._run.best_epoch if self._run is not None else None
        if best is None:
            metric = workload.objective.metric
            reported = bool(self._run and self._run.epochs)
            reason = "objective was NaN" if reported else f"nothing was reported: no value of {metric}"
            return self._result(Outcome.ERROR, Failure(reason))
        return self._result(Outcome.COMPLETED, None)

    def _result(self, outcome: Outcome, failure: Failure | None) -> TrialResult:
        run = self._run
        best: EpochMetrics | None = run.best_epoch if run is not None else None
        value = None
        if run is not None and best is not None:
            value = best.metrics[run.workload.objective.metric]
        return TrialResult(
            outcome=outcome,
            value=value,
            metrics=best.metrics if best is not None else {},
            epochs=tuple(run.epochs) if run is not None else (),
            peaks=self._meter.peaks(),
            failure=None if failure is None else self._with_growth(outcome, failure),
            environment=_environment(self._request, self._loaded),
            checkpoint=self._folder.checkpoint.name if self._folder.checkpoint.exists() else None,
            warnings=(*(run.warnings if run is not None else ()), *self._meter.warnings()),
            growth_bytes=self._meter.growth_bytes(),
            timeline=self._meter.timeline.to_json(),
        )

    def _with_growth(self, outcome: Outcome, failure: Failure) -> Failure:
        """Say of a trial that ran out of memory because each step left some behind that it did."""
        growth_bytes = self._meter.growth_bytes()
        ran_out = [Outcome.OUT_OF_MEMORY]
        if self._device.type == "cpu":  # on a GPU, what grew is not the host's
            ran_out.append(Outcome.HOST_OUT_OF_MEMORY)
        if not growth_bytes or outcome not in ran_out:
            return failure
        grew = f"{failure.reason}: memory grew by {format_bytes(growth_bytes)} per training step"
        return dataclasses.replace(failure, reason=grew)

    def _with_profile(self, result: TrialResult, workload: Workload) -> TrialResult:
        """Add the allocator's true peak, measured on a state made anew; never lose the result."""
        loaders = self._run.loaders if self._run is not None else None
        self._run = None
        gc.collect()
        train_steps, eval_steps = self._request.example_steps
        if loaders is None or train_steps == 0:
            return result
        warnings = result.warnings
        allocated_bytes = None
        try:
            with _kept_quiet():
                allocated_bytes = allocated_peak(
                    workload,
                    self._request.params,
                    self._device,
                    train_batches=loaders.train,
                    eval_batches=loaders.eval,
                    train_steps=train_steps,
                    eval_steps=eval_steps,
                )
        except Exception as error:
            warnings = (*warnings, f"the allocator's peak could not be profiled: {error}")
        peaks = dataclasses.replace(result.peaks, allocated_bytes=allocated_bytes)
        return dataclasses.replace(result, peaks=peaks, warnings=warnings)


@contextlib.contextmanager
def _kept_quiet() -> Iterator[None]:
    """Do something extra without a trace in the random state."""
    import torch

    with torch.random.fork_rng(devices=[]):
        yield


def _seed(seed: int) -> None:
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _environment(request: Request, loaded: LoadedWorkload | None) -> dict[str, Any]:
    import torch

    cuda = torch.cuda.get_device_name() if request.device == "cuda" else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tuner": tuner.__version__,
        "workload_digest": None if loaded is None else loaded.digest,
        "device": request.device,
        "device_name": cuda,
        "threads": request.threads,
        "seed": request.seed,
        "platform": platform.platform(),
        "pid": os.getpid(),
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the report is written; taking PyTorch apart would only take time
