"""A trial that runs again is told what the study's loop told it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.search.stand_ins import CONTEXT, FunctionLauncher, FunctionTrial, Watcher, completed, session_on
from tuner.execution.run_folder import Request, RunFolder
from tuner.memory.targets import resolve_target
from tuner.scheduling.devices import Place
from tuner.scheduling.ledger import Ledger
from tuner.search import loop, rerun
from tuner.search.events import Goal, Stopper
from tuner.units import GIB

CPU = Place("cpu", "a CPU", None, 64 * GIB, 32 * GIB)
GPU = Place("cuda:0", "a GPU", "GPU-1", 80 * GIB, 80 * GIB)
CARD = dataclasses.replace(resolve_target("cuda"), context_bytes=567)


class Noting(FunctionLauncher):
    """Keeps the requests."""

    def start(self, folder: RunFolder, request: Request) -> FunctionTrial:
        self.request = request
        return super().start(folder, request)


@pytest.mark.parametrize(
    ("place", "seed", "context"), [(CPU, None, None), (CPU, 11, CONTEXT), (GPU, None, 567), (GPU, 11, 567)]
)
def test_the_context_is_given_as_it_was_the_first_time(
    place: Place,
    seed: int | None,
    context: int | None,
    sqlite_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = CARD if place is GPU else resolve_target("cpu")
    for module in (loop, rerun):
        monkeypatch.setattr(module, "present_target", lambda name: target)
    launcher = Noting(completed)
    with session_on(sqlite_url, tmp_path, seed=seed) as session:
        session.plan = dataclasses.replace(session.plan, places=(place,))
        ledger = Ledger(session.reservations, (place,))
        loop.StudyLoop(
            session, launcher, ledger, observer=Watcher(), goal=Goal(trials=1), stopper=Stopper()
        ).run()
        trial = next(t for t in session.reader.trials(session.study.id) if t.outcome == "completed")
        again = rerun.rerun_request(session.study, trial, place, threads=None)
    assert launcher.request.context_bytes == again.context_bytes == context
