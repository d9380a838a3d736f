"""What this driver has seen end: what it says about the next trial."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.search.stand_ins import Watcher, completed, session_on
from tuner.scheduling.devices import Place
from tuner.search.events import Goal
from tuner.search.tally import Tally
from tuner.units import GIB, MIB

GPU = Place("cuda:0", "a GPU", "GPU-1", 80 * GIB, 80 * GIB)


@pytest.mark.parametrize(("seen", "set_aside"), [(0, 3 * GIB), (900 * MIB, 3 * GIB), (10 * GIB, 11 * GIB)])
def test_the_largest_process_seen_may_raise_a_trials_host_memory_and_never_lowers_it(
    seen: int, set_aside: int, sqlite_url: str, tmp_path: Path
) -> None:
    """The kernel's figure is of one process: eight loader workers beside it count nowhere (getrusage(2))."""
    with session_on(sqlite_url, tmp_path) as session:
        trial_id = session.writer.add_trial(session.study.id, 0, {"width": 4}, driver_id=session.driver_id)
        session.writer.record_result(
            trial_id, dataclasses.replace(completed({"width": 4}), host_peak_bytes=seen or None)
        )
        session.plan = dataclasses.replace(session.plan, places=(GPU,))
        assert Tally(session, Goal(trials=3), Watcher()).host_bytes() == set_aside
