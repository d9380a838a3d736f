"""A driver that asks for memory at random, holds it for a moment, and may die with it.

What it does is appended to a file while the book is held still: `ask`, `grant`, `free`, each with
the trial and its bytes. Replayed, the file tells whether the pool was ever exceeded.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Literal, cast

from sqlalchemy import URL

from tuner.processes import this_process
from tuner.records import Outcome, TrialResult
from tuner.scheduling.packing import Room, Wish, decide
from tuner.store.drivers import Drivers
from tuner.store.engine import open_engine, parse_url
from tuner.store.reservations import Book, Reservations
from tuner.store.writer import Writer

Death = Literal["waiting", "holding"]
POOL = 100
DEVICE = Room("GPU-1", "cuda:0", pool_bytes=POOL, alone_bytes=POOL)
HOST = Room("h", "the host's memory", pool_bytes=0, alone_bytes=None)


def reserve_at_random(
    url: URL, study_id: int, seed: int, log: Path, count: int, die: Death | None = None
) -> None:
    """Run `count` trials, one after the other; die in the second half of them, if told to."""
    engine, draw = open_engine(url), random.Random(seed)
    writer, reservations = Writer(engine), Reservations(engine)
    driver_id = Drivers(engine).join(study_id, this_process())
    for number in range(count):
        trial_id = writer.add_trial(study_id, driver_id * 1000 + number, {}, driver_id=driver_id)
        size = draw.choice([10, 20, 40, 70, POOL])
        asked = False

        def decision(book: Book, trial_id: int = trial_id, size: int = size) -> bool:
            nonlocal asked
            granted = decide(Wish(size), [DEVICE], HOST, book.held, trial_id=trial_id).granted
            book.put(
                trial_id, driver_id, device=DEVICE.key, device_bytes=size, host="h", host_bytes=0,
                granted=granted,
            )  # fmt: skip
            lines = "" if asked else f"ask {trial_id} {size}\n"
            append(log, lines + (f"grant {trial_id} {size}\n" if granted else ""))
            asked = True
            return granted

        while not reservations.decide(decision):
            time.sleep(0.005)
            if die == "waiting" and number >= count // 2:
                append(log, f"free {trial_id} 0\n")
                os._exit(9)
        time.sleep(draw.random() * 0.02)
        append(log, f"free {trial_id} {size}\n")
        if die == "holding" and number >= count // 2:
            os._exit(9)
        writer.record_result(trial_id, TrialResult(Outcome.COMPLETED))
    Drivers(engine).leave(driver_id, "done")
    engine.dispose()


def append(log: Path, text: str) -> None:
    """Add lines at once."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, text.encode())
    os.close(descriptor)


if __name__ == "__main__":
    reserve_at_random(
        parse_url(sys.argv[1]),
        *map(int, sys.argv[2:4]),
        log=Path(sys.argv[4]),
        count=int(sys.argv[5]),
        die=cast("Death", sys.argv[6]) if len(sys.argv) > 6 else None,
    )
