"""A driver in a process of its own: stand-ins for predictions and trials, a real database."""

from __future__ import annotations

from pathlib import Path

from tests.search.stand_ins import ToldLauncher, Watcher, completed, session_on
from tuner.scheduling.ledger import Ledger
from tuner.search.events import Goal, Stopper
from tuner.search.loop import StudyLoop
from tuner.units import MIB


def drive(url: str, folder: str, trials: int, jobs: int, seconds: float | None) -> None:
    """Run the study `widths` to its end; trials take so long, or never end."""
    with session_on(url, Path(folder), allocated=lambda params: MIB, jobs=jobs) as session:
        ledger = Ledger(session.reservations, session.plan.places, pool_bytes=session.plan.pool_bytes)
        loop = StudyLoop(
            session,
            ToldLauncher(completed, seconds),
            ledger,
            observer=Watcher(),
            goal=Goal(trials=trials),
            stopper=Stopper(),
        )
        loop.run()
