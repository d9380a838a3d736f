"""Predicted against measured: one configuration at a time, and the smallest cap it runs under."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_configurations import CONFIGURATIONS, Configuration
from benchmarks.gpu_report import FAILED, RAN, SKIPPED, errors_of
from benchmarks.gpu_standby import Standby
from tuner.units import MIB

Row = dict[str, Any]
_CAP_TRIES = 4
_CAP_STEP = 0.02  # of the predicted requirement: the first step away from it; doubled each time
_SEGMENT = 2 * MIB


class Cap(NamedTuple):
    """What is known of the smallest cap: the smallest that ran, the largest that failed."""

    ran_bytes: int | None
    failed_bytes: int | None
    tries: list[tuple[int, bool]]


class _NoAnswer(Exception):
    """A child under a cap ended otherwise than by running, or out of memory."""


class Comparison:
    """Predicts and measures, one configuration at a time.

    Args:
        standby: The children.
        environment: The device.
        timeout_seconds: For each child.
        snapshots: Where memory snapshots are kept, or None.
    """

    def __init__(
        self, standby: Standby, environment: Row, timeout_seconds: float, *, snapshots: Path | None
    ) -> None:
        self.environment = environment
        self._standby, self._timeout_seconds, self._snapshots = standby, timeout_seconds, snapshots
        self._context_bytes: int | None = None
        self._device = {key: environment[key] for key in ("device", "compute_capability", "capacity_bytes")}

    def fact(self, name: str) -> Row:
        """Measure a fact; the context is kept for the predictions of device bytes."""
        answer = self._standby.ask("fact", name=name).answer(self._timeout_seconds)
        if name == "context" and "rows" in answer:
            self._context_bytes = answer["rows"][1]["measured"]  # after a warm-up, as a trial's baseline
        return answer

    def configuration(self, name: str, *, asked_for: bool) -> Row:
        """Predict and measure a configuration.

        One that PyTorch cannot run here is skipped, unless it was asked for by name.
        """
        configuration = CONFIGURATIONS[name]
        row: Row = {"name": name, "about": configuration.about, "steps": configuration.steps}
        if not asked_for and (reason := self._cannot_run(configuration)):
            return {**row, "status": SKIPPED, "reason": reason}
        start = time.perf_counter()
        asked = self._standby.ask("predict", name=name, **self._device)
        measured = None if configuration.capped else self._measure(name)
        predicted = asked.answer(self._timeout_seconds)
        if "failed" in predicted:
            return {
                **row,
                "status": FAILED,
                "reason": f"prediction: {predicted['failed']}",
                "measured": measured,
            }
        if self._context_bytes is not None and predicted["reserved_bytes"] is not None:
            predicted["device_bytes"] = self._context_bytes + predicted["reserved_bytes"]
        if measured is None:
            measured = self._smallest_cap(name, predicted["required_bytes"])
        row |= {"predicted": predicted, "measured": measured, "seconds": time.perf_counter() - start}
        if "failed" in measured:
            return {**row, "status": FAILED, "reason": measured["failed"]}
        known = measured
        if measured.get("required_bytes", 0) is None:  # never ran: the error is at least this
            known = {**measured, "required_bytes": measured["failed_bytes"]}
        return {**row, "status": RAN, "errors": errors_of(predicted, known)}

    def _cannot_run(self, configuration: Configuration) -> str:
        if self.environment["device"] == "cpu":
            return "PyTorch runs it on a GPU only" if configuration.cuda_only else ""
        if tuple(self.environment["compute_capability"]) < configuration.capability:
            return f"needs compute capability {'.'.join(map(str, configuration.capability))}"
        return ""

    def _measure(self, name: str, cap_bytes: int | None = None) -> Row:
        snapshot = None
        if self._snapshots is not None and cap_bytes is None:
            self._snapshots.mkdir(parents=True, exist_ok=True)
            snapshot = str(self._snapshots.resolve() / f"{name}.pickle")
        asked = self._standby.ask(
            "measure", name=name, cap_bytes=cap_bytes, snapshot=snapshot, **self._device
        )
        return asked.answer(self._timeout_seconds)

    def _smallest_cap(self, name: str, predicted_bytes: int) -> Row:
        def runs(cap_bytes: int) -> bool:
            answer = self._measure(name, cap_bytes)
            if "failed" in answer:
                raise _NoAnswer(f"under a cap: {answer['failed']}")
            return not answer["out_of_memory"]

        try:
            found = smallest_cap(runs, predicted_bytes)
        except _NoAnswer as reason:
            return {"failed": str(reason)}
        return {"required_bytes": found.ran_bytes, "failed_bytes": found.failed_bytes, "tries": found.tries}


def smallest_cap(runs: Callable[[int], bool], predicted_bytes: int, tries: int = _CAP_TRIES) -> Cap:
    """Look for the smallest cap under which something runs, beginning at the predicted one.

    Args:
        runs: Whether it runs under a cap in bytes.
        predicted_bytes: Where to begin.
        tries: How often to try.
    """
    ran: int | None = None
    failed: int | None = None
    done: list[tuple[int, bool]] = []
    cap, step = _whole_segments(predicted_bytes), _CAP_STEP * predicted_bytes
    for _ in range(tries):
        done.append((cap, runs(cap)))
        if done[-1][1]:
            ran = cap
        else:
            failed = cap
        if ran is not None and failed is not None:
            cap = _whole_segments((ran + failed) // 2)
            if cap in (ran, failed):
                break
        else:
            cap = _whole_segments(round(cap - step if failed is None else cap + step))
            step *= 2
    return Cap(ran, failed, done)


def _whole_segments(size_bytes: int) -> int:
    return -(-size_bytes // _SEGMENT) * _SEGMENT
