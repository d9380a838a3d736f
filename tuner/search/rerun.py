"""Training a trial's configuration again, beside its study: nothing of it is recorded there."""

from __future__ import annotations

import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tuner.errors import UsageError
from tuner.execution.launcher import Launcher, visible_threads
from tuner.execution.run_folder import Request, RunFolder
from tuner.records import Outcome, TrialResult
from tuner.scheduling.devices import Place, choose_places, present_target
from tuner.search.environment import given_context_bytes, study_file
from tuner.steps import EVAL_STEPS, TRAIN_STEPS
from tuner.store.rows import StudyRecord, TrialRecord

_LOOK_SECONDS = 0.1


def check_rerun(study: StudyRecord, trial: TrialRecord, *, force: bool) -> Path:
    """Check that a trial can be run again; return its study file.

    Raises:
        UsageError: It still runs, was never launched (without `force`), or its study file is gone.
    """
    if trial.is_running:
        raise UsageError(f"trial {trial.number} of study '{study.name}' is still running")
    if not Outcome(trial.outcome).launched and not force:
        why = trial.reason or trial.outcome
        raise UsageError(
            f"trial {trial.number} of study '{study.name}' was never launched: {why}",
            hint="--force launches it, under the study's budget",
        )
    file = study_file(study.workload_reference)
    if file is None:
        raise UsageError(f"the study's workload is not there any more: {study.workload_reference}")
    return file


def place_of(study: StudyRecord, trial: TrialRecord) -> Place:
    """Return the device that the trial ran on if this host has it, else the freest of its target.

    Raises:
        UsageError: This host has no such device.
    """
    places = choose_places(study.target)
    return next((place for place in places if place.key == trial.device), places[0])


def rerun_request(study: StudyRecord, trial: TrialRecord, place: Place, *, threads: int | None) -> Request:
    """Return the request that the trial had, for a device of this host.

    A trial that was never launched gets the study's budget as its cap.

    Args:
        study: The trial's study.
        trial: The trial.
        place: The device.
        threads: Another number of intra-op threads than it had, or None.
    """
    return Request(
        workload=study.workload_reference,
        params=trial.params,
        device=place.kind,
        reservation_bytes=trial.reservation_bytes or study.budget_bytes,
        context_bytes=given_context_bytes(study, present_target(place.target)),
        seed=trial.seed,
        threads=threads or trial.environment.get("threads") or visible_threads(),
        example_steps=(TRAIN_STEPS, EVAL_STEPS),
        visible_device=place.visible_device,
        attempt=trial.attempt,
    )


def run_again(
    launcher: Launcher, folder: RunFolder, request: Request, on_event: Callable[[dict[str, Any]], None]
) -> TrialResult:
    """Run a request to its end; whatever stops this function stops the trial's processes too.

    Args:
        launcher: Starts it.
        folder: A new run folder.
        request: What to run.
        on_event: Told each event of the run folder, in order.
    """
    running = launcher.start(folder, request)
    seen = 0
    result = None
    try:
        while result is None:
            select.select([running], [], [], _LOOK_SECONDS)
            result = running.poll()
            events = folder.read_events()
            for event in events[seen:]:
                on_event(event)
            seen = len(events)
    finally:
        running.kill()
    return result
