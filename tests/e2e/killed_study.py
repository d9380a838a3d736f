"""A study that kills its own process (SIGKILL) at a named step: for the kill matrix.

Everything is real but predictions and trials: the loop, Optuna, the database, run folders. A trial
writes its report when it is looked at the second time, as a worker would.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from sqlalchemy import Engine, event

from tests.search.stand_ins import BUDGET, FunctionPredictor, Watcher, Widths, completed, session_on
from tuner.execution.run_folder import Request, RunFolder, StopRequest
from tuner.records import Outcome, TrialResult
from tuner.scheduling.ledger import Ledger
from tuner.search import recover as recovery
from tuner.search.calibrations import Calibrations
from tuner.search.events import Goal, Stopper
from tuner.search.loop import StudyLoop
from tuner.search.optuna_study import OptunaStudy
from tuner.store.drivers import Drivers
from tuner.store.reservations import Reservations
from tuner.store.slots import Slots
from tuner.store.writer import Writer

TRIALS, JOBS = 5, 2


class ReportingTrial:
    """A trial without a process."""

    pid = 1 << 22  # above the largest pid there can be

    def __init__(self, folder: RunFolder, result: TrialResult) -> None:
        self._folder, self._result, self._looks = folder, result, 0

    def fileno(self) -> int:
        return -1

    def poll(self) -> TrialResult | None:
        self._looks += 1
        return None if self._looks == 1 else self.report()

    def report(self) -> TrialResult:
        self._folder.write_report(self._result.to_json())
        return self._result

    def stop(self, request: StopRequest, *, grace_seconds: float) -> None:
        pass

    def kill(self) -> None:
        pass


class LoggingLauncher:
    """Adds a line to a file for each launch; odd widths need the whole budget."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def prepare(self) -> None:
        pass

    def start(self, folder: RunFolder, request: Request) -> ReportingTrial:
        folder.write_request(request)
        result = completed(request.params)
        if request.params["width"] % 2 and (request.reservation_bytes or 0) < BUDGET:
            result = dataclasses.replace(result, outcome=Outcome.OUT_OF_MEMORY, value=None)
        line = json.dumps({"number": int(folder.path.name[:5]), "attempt": request.attempt})
        with self._log.open("a", encoding="utf-8") as log:
            log.write(line + "\n")
        return ReportingTrial(folder, result)


# What is done at each step, in the loop's order; the number is the call at which to kill.
STEPS: dict[str, tuple[Any, str, int]] = {
    "create the study": (Writer, "create_study", 1),
    "join": (Drivers, "join", 1),
    "beat": (Drivers, "beat", 1),
    "claim a slot": (Slots, "claim", 3),
    "ask": (OptunaStudy, "ask", 3),
    "rehearse": (OptunaStudy, "rehearse", 3),
    "suggest": (Widths, "suggest", 3),
    "trace": (FunctionPredictor, "estimate", 3),
    "predict": (Calibrations, "predict", 3),
    "add the trial": (Writer, "add_trial", 3),
    "record the prediction": (Writer, "record_prediction", 3),
    "reserve": (Reservations, "decide", 3),
    "make the run folder": (RunFolder, "create", 3),
    "record the launch": (Writer, "record_launch", 3),
    "tell of the launch": (Watcher, "launched", 3),
    "launch": (LoggingLauncher, "start", 3),
    "note the process": (Reservations, "runs_as", 3),
    "report": (ReportingTrial, "report", 3),
    "learn": (Calibrations, "learn", 3),
    "record an attempt": (Writer, "record_attempt", 1),
    "tell of another attempt": (Watcher, "again", 1),
    "write the result": (RunFolder, "write_result", 3),
    "record the result": (Writer, "record_result", 3),
    "tell Optuna": (OptunaStudy, "tell", 3),
    "tell of the end": (Watcher, "ended", 3),
    "leave": (Drivers, "leave", 1),
}
# The same after a first kill in the middle of a launch.
STEPS_OF_RECOVERY: dict[str, tuple[Any, str, int]] = {
    "see who is lost": (Drivers, "lost", 1),
    "look for a left result": (recovery, "_left_result", 1),
    "record what was left": (Writer, "record_result", 1),
    "look for what was not told": (OptunaStudy, "running", 1),
    "tell Optuna again": (OptunaStudy, "tell", 1),
    "close the lost driver": (Drivers, "leave", 1),
    "ask again": (OptunaStudy, "ask_again", 1),
}


@dataclass(frozen=True)
class Kill:
    """Where to kill: before or after the call of a step, or (`commit`) before the n-th transaction ends."""

    step: str
    before: bool
    commit: int = 0


def run_study(url: str, folder: str, kill: Kill | None) -> None:
    """Create or resume the study and drive it to its goal, or to the kill."""
    if kill is not None:
        _arm(kill)
    path = Path(folder)
    with session_on(url, path, seed=2, jobs=JOBS) as session:
        ledger = Ledger(session.reservations, session.plan.places)
        launcher = LoggingLauncher(path / "launches.jsonl")
        goal = Goal(trials=TRIALS)
        StudyLoop(session, launcher, ledger, observer=Watcher(), goal=goal, stopper=Stopper()).run()


def _arm(kill: Kill) -> None:
    if kill.commit:
        event.listen(Engine, "commit", _counted(lambda connection: None, kill.commit, before=True))
        return
    owner, name, call = (STEPS | STEPS_OF_RECOVERY)[kill.step]
    found = vars(owner)[name]
    if isinstance(found, classmethod):
        counted = _counted(cast("Any", found).__func__, call, before=kill.before)
        setattr(owner, name, classmethod(counted))
    else:
        setattr(owner, name, _counted(found, call, before=kill.before))


def _counted(original: Callable[..., Any], call: int, *, before: bool) -> Callable[..., Any]:
    """Return a function that kills this process at its `call`-th call."""
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and before:
            os.kill(os.getpid(), signal.SIGKILL)
        value = original(*args, **kwargs)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    return counted
