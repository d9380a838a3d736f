"""The default training loop, and the `Run` that a workload's own `fit(run)` gets.

An epoch: all training batches, then all evaluation batches, then one report. Metrics are means
over samples. The weights of the best epoch are kept.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tuner.execution.run_folder import RunFolder, StopRequest
from tuner.measure.meters import Meter
from tuner.measure.timeline import EVENT as TIMELINE
from tuner.records import EpochMetrics, Outcome
from tuner.steps import batches_in, eval_once, modules_in, set_training, to_device, train_once
from tuner.workload import Loaders, Workload

if TYPE_CHECKING:
    import torch


_EVENT_SECONDS = 5.0  # between what a killed trial leaves of its timeline
_MOST_SHAPES = 4096  # of batches that are told apart; any further one counts as new


class StopRequested(Exception):
    """The driver asked the trial to stop."""

    def __init__(self, request: StopRequest) -> None:
        super().__init__(request.reason)
        self.request = request


class Run:
    """One training run, as the training loop sees it.

    Attributes:
        workload, params, device: What is trained, and where.
        state: What the workload's `setup` returned.
        loaders: Its data.
        best_epoch: The epoch with the best objective so far, or None.
        epochs: What was reported, in order.
        warnings: What was noticed, a sentence each.
    """

    def __init__(
        self,
        workload: Workload,
        params: dict[str, Any],
        device: torch.device,
        *,
        state: Any,
        loaders: Loaders,
        folder: RunFolder,
        meter: Meter,
    ) -> None:
        self.workload, self.params, self.device = workload, params, device
        self.state, self.loaders = state, loaders
        self.best_epoch: EpochMetrics | None = None
        self.epochs: list[EpochMetrics] = []
        self.warnings: list[str] = []
        self._folder, self._meter = folder, meter
        self._started = time.monotonic()
        self._next_event = self._started + _EVENT_SECONDS
        self._shapes: set[tuple[tuple[torch.Size, torch.dtype], ...]] = set()
        self._foreseen_bytes: int | None = None
        self._meter.epoch_ended()  # what the set-up took is not the first epoch's

    def report(self, metrics: dict[str, float]) -> None:
        """Report the metrics of the epoch that has ended; keep the weights if it is the best.

        Raises:
            KeyError: The objective's metric is not among them.
            StopRequested: The driver asked the trial to stop, or it is below its limit.
        """
        objective = self.workload.objective
        if objective.metric not in metrics:
            known = ", ".join(sorted(metrics)) or "none"
            raise KeyError(
                f"the steps report no '{objective.metric}', the objective's metric; they report: {known}"
            )
        within = self._meter.epoch_ended()
        epoch = EpochMetrics(
            epoch=len(self.epochs) + 1,
            metrics={name: float(value) for name, value in metrics.items()},
            seconds=time.monotonic() - self._started,
            peak_bytes=self._meter.peak_bytes(),
            epoch_peak_bytes=within.device_bytes,
            epoch_allocated_bytes=within.allocated_bytes,
            epoch_reserved_bytes=within.reserved_bytes,
        )
        self.epochs.append(epoch)
        self._append_timeline()
        self._folder.append_event("epoch", **epoch.to_json())
        value = epoch.metrics[objective.metric]
        best = None if self.best_epoch is None else self.best_epoch.metrics[objective.metric]
        if not math.isnan(value) and objective.better(value, best):
            self.best_epoch = epoch
            self._keep_weights()
        request = self._folder.stop_request() or self._below_limit()
        if request is not None:
            raise StopRequested(request)

    def _below_limit(self) -> StopRequest | None:
        """Return that the trial shall end since others did better by this epoch, if so."""
        epoch, workload = len(self.epochs), self.workload
        if workload.own_fit is None and (epoch >= workload.epochs or self.is_stale()):
            return None  # it is done: nothing would be saved, and its value is worth more complete
        limits = self._folder.read_limits()
        if limits is None:
            return None
        best = None if self.best_epoch is None else self.best_epoch.metrics[workload.objective.metric]
        reason = limits.reason_to_stop(epoch, best)
        return None if reason is None else StopRequest(Outcome.PRUNED_METRIC, reason)

    def is_stale(self) -> bool:
        """Whether the objective has not improved for `patience` epochs."""
        patience, best = self.workload.patience, self.best_epoch
        return patience is not None and best is not None and len(self.epochs) - best.epoch >= patience

    def train_epoch(self) -> dict[str, float]:
        """Train on every batch once; return the metrics that the steps report."""
        with self._meter.phase("train"):
            set_training(self.state, training=True)
            return self._over(self.loaders.train, train_once, training=True)

    def eval_epoch(self) -> dict[str, float]:
        """Evaluate on every batch once; return the metrics that the steps report."""
        if not self.workload.has_eval_step or self.loaders.eval is None:
            return {}
        with self._meter.phase("eval"):
            set_training(self.state, training=False)
            return self._over(self.loaders.eval, eval_once, training=False)

    def _over(
        self, batches: Iterable[Any], step: Callable[[Workload, Any, Any], Any], *, training: bool
    ) -> dict[str, float]:
        totals: dict[str, Any] = {}
        samples = 0
        for host_batch in batches:
            batch = to_device(host_batch, self.device)
            is_new = training and self._look_at(batch)
            count = _samples_in(batch)
            for name, value in (step(self.workload, self.state, batch) or {}).items():
                detached = value.detach() if hasattr(value, "detach") else value
                totals[name] = totals.get(name, 0.0) + detached * count
            samples += count
            self._meter.step_ended(training=training, new_shape=is_new)
            if time.monotonic() >= self._next_event:
                self._append_timeline()
        return {name: float(total) / samples for name, total in totals.items()}

    def _look_at(self, batch: Any) -> bool:
        """Return whether a training batch has a new shape; note one larger than the prediction was told."""
        shape = tuple((tensor.shape, tensor.dtype) for tensor in _tensors_in(batch))
        if shape in self._shapes:
            return False
        if len(self._shapes) < _MOST_SHAPES:
            self._shapes.add(shape)
        if self._foreseen_bytes is None:
            example = self.workload.example_batch(self.params, self.device)
            self._foreseen_bytes = max(map(_bytes_in, batches_in(example)))
        if _bytes_in(batch) > self._foreseen_bytes and not self.warnings:
            self.warnings.append(
                f"a batch of {_bytes_in(batch)} bytes is larger than example_batch's {self._foreseen_bytes}: "
                "the prediction was made for less"
            )
        return True

    def _append_timeline(self) -> None:
        """Leave the timeline's new points to whoever finds this trial without a report."""
        self._next_event = time.monotonic() + _EVENT_SECONDS
        points = self._meter.timeline.take_new()
        if points:
            with contextlib.suppress(OSError):  # a full disk: the trial needs it for other things
                self._folder.append_event(TIMELINE, points=points)

    def _keep_weights(self) -> None:
        import torch

        weights = [module.state_dict() for module in modules_in(self.state)]
        if weights:
            torch.save(weights, self._folder.checkpoint)


def default_fit(run: Run) -> None:
    """Train for the workload's epochs, or until the objective is stale."""
    for _ in range(run.workload.epochs):
        metrics = run.train_epoch()
        metrics.update(run.eval_epoch())
        run.report(metrics)
        if run.is_stale():
            return


def _tensors_in(batch: Any) -> list[torch.Tensor]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def _samples_in(batch: Any) -> int:
    """Return the first dimension of the batch's first tensor; 1 where there is none."""
    for tensor in _tensors_in(batch):
        return int(tensor.shape[0]) if tensor.dim() else 1
    return 1


def _bytes_in(batch: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors_in(batch))
