"""A long run under fire: nothing is lost, nothing is done twice, nothing is left over.

Two drivers (`tuner run`, real children) share one study. As it goes on, at seeded moments, trials,
supervisors and drivers are killed with SIGKILL, and the PostgreSQL server is restarted, in order or
as after a crash. A killed driver is started again. In the end every trial is accounted for in our
tables, in Optuna's and in the run folders; no process, slot or reservation is left; drivers have
leaked no file descriptor, and their memory is flat.

Then `--leaks` trials in a row, each leaving 300 MiB behind: each must start from the same baseline.

Run as: python benchmarks/soak.py [--trials 1000] [--leaks 200] [--database sqlite] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.postgresql import Server
from benchmarks.soak_checks import check, query
from benchmarks.soak_lives import Incarnation, descriptors_of
from tuner.processes import process_memory
from tuner.units import MIB

SOAKED = Path(__file__).with_name("soaked.py")
TRIALS_PER_BLOW = 5
KINDS = ("trial", "supervisor", "driver", "restart fast", "restart immediate")
WEIGHTS = (6, 3, 2, 1, 1)
BASELINE_BYTES = 2 * MIB  # by which a trial may start from more or less than the first
SLOPE_BYTES = 32 * 1024  # a driver's growth per trial of the study: Optuna keeps each in memory, 10 KiB
LEAKED_DESCRIPTORS = 2  # the least at the end over the least earlier on: a connection that is opened late
_LOOK_SECONDS = 0.5
_DYING_SECONDS = 5.0
_NEW_LIFE = "--- a new life\n"
UNREACHABLE = 5  # exit code: the database cannot be used


class Driver:
    """A `tuner run` that is started again when it was killed."""

    def __init__(self, folder: Path, name: str, command: list[str], environment: dict[str, str]) -> None:
        self._folder, self._name = folder, name
        self._command, self._environment = command, environment
        self.lives: list[Incarnation] = []
        self.problems: list[str] = []
        self.refused = 0
        self._shot = False
        self.start()

    @property
    def done(self) -> bool:
        """Whether it has ended by itself, and well; one that was shot is started again."""
        code = self._process.poll()
        if code is None or code == 0:
            return code == 0
        said = self.log.read_text(encoding="utf-8").rpartition(_NEW_LIFE)[2]
        if code == UNREACHABLE and "study '" not in said:
            self.refused += 1  # at its start a database that is away is an error, like a wrong host
        elif not self._shot:
            self.problems.append(f"{self._name} ended with code {code}: {said[-2000:]}")
        self.start()
        return False

    @property
    def log(self) -> Path:
        """What it said, in all its lives."""
        return self._folder / f"{self._name}.log"

    def start(self) -> None:
        """Begin a life."""
        self._shot = False
        self.lives.append(Incarnation())
        with self.log.open("ab") as log:
            log.write(_NEW_LIFE.encode())
            log.flush()
            self._process = subprocess.Popen(
                self._command, cwd=self._folder, env=self._environment, stdout=log, stderr=log
            )

    def kill(self) -> None:
        """Shoot it."""
        self._shot = True
        self._process.kill()
        self._process.wait()

    def sample(self, finished: int) -> None:
        """Note its memory and descriptors."""
        memory = process_memory(self._process.pid)
        with contextlib.suppress(OSError):
            descriptors = descriptors_of(self._process.pid)
            if memory is not None:
                self.lives[-1].samples.append((finished, memory.resident_bytes, descriptors))


class Soak:
    """One study under fire.

    Args:
        folder: An empty folder.
        url: The database.
        trials: Launched trials that are wanted.
        seed: Of the moments and the kinds of blows.
        server: What is restarted; None where there is no server.
        first: The kinds of the first blows, which are not left to chance.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        *,
        trials: int,
        seed: int,
        server: Server | None,
        first: Sequence[str] = (),
    ) -> None:
        self._folder, self._url, self._trials, self._server = folder, url, trials, server
        self._random = random.Random(seed)
        self._first = list(first)
        self.blows: Counter[str] = Counter()
        self._next = TRIALS_PER_BLOW // 2
        self._mark = f"SOAK_MARK={folder}"
        command = [
            *(sys.executable, "-P", "-m", "tuner", "run", str(SOAKED), "--storage", url),
            *("--trials", str(trials), "--jobs", "2", "--threads", "1", "--max-failures", str(trials)),
            *("--runs-dir", str(folder / "runs"), "--keep-checkpoints", "none"),
        ]
        environment = clean_environment(SOAK_MARK=str(folder))
        self.drivers = [Driver(folder, f"driver-{number}", command, environment) for number in range(2)]

    def run(self, progress: Callable[[str], None]) -> dict[str, Any]:
        """Run to the end; return what was done and what is wrong."""
        started = time.monotonic()
        told = 0.0
        try:
            while sum(driver.done for driver in self.drivers) < len(self.drivers):
                finished = self._finished()
                if finished is not None:
                    for driver in self.drivers:
                        driver.sample(finished)
                    if finished >= self._next and finished < self._trials - 1:
                        self._strike(finished)
                if time.monotonic() - told > 10:
                    told = time.monotonic()
                    progress(
                        f"{finished} of {self._trials} trials, {told - started:.0f} s: {dict(self.blows)}"
                    )
                time.sleep(_LOOK_SECONDS)
        finally:
            for driver in self.drivers:
                driver.kill()
        return self._results(time.monotonic() - started)

    def _finished(self) -> int | None:
        """Return how many trials have ended; None while the database is away."""
        try:
            rows = query(self._url, "SELECT count(*) FROM tuner_trial WHERE outcome IS NOT NULL")
        except (sqlite3.OperationalError, psycopg.Error):
            return None
        return int(rows[0][0])

    def _strike(self, finished: int) -> None:
        """Kill or restart something, drawn at random."""
        count = len(KINDS) if self._server is not None else 3
        kind = self._random.choices(KINDS[:count], WEIGHTS[:count])[0]
        kind = self._first[0] if self._first else kind
        if kind.startswith("restart"):
            assert self._server is not None
            self._server.restart(kind.partition(" ")[2])
        elif kind == "driver":
            # The first one lives through the second half, so that its memory is seen.
            shot = self.drivers[1:] if finished > self._trials / 2 else self.drivers
            self._random.choice(shot).kill()
        else:
            found = [pid for pid, command in self._processes() if _is_a(kind, command)]
            if not found:
                return  # between two trials: at the next look
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._random.choice(found), signal.SIGKILL)
        self.blows[kind] += 1
        self._next = finished + self._random.randint(2, 2 * TRIALS_PER_BLOW - 2)
        self._first = self._first[1:]

    def _processes(self) -> list[tuple[int, str]]:
        """Return pid and command line of every process that was started by a driver of this soak."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{self._mark}\0".encode() in (path / "environ").read_bytes() + b"\0":
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found.append((int(path.name), command))
        return found

    def _results(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + _DYING_SECONDS
        while (left := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        lives = [life for driver in self.drivers for life in driver.lives]
        slopes = [slope for life in lives if (slope := life.slope_bytes()) is not None]
        leaked = [dict(more) for life in lives if (more := life.leaked_descriptors()) is not None]
        usual = statistics.median(sum(kinds.values()) for kinds in leaked) if leaked else 0
        wrong = check(self._url, self._folder / "runs", self._trials)
        wrong["drivers end well"] = [problem for driver in self.drivers for problem in driver.problems]
        wrong["no process is left"] = [command for _, command in left]
        # A leak is in every life; in some, one child's pipes or a connection more were open all the time.
        wrong["no descriptor is leaked"] = [f"usually {usual} more"] if usual > LEAKED_DESCRIPTORS else []
        wrong["drivers do not grow"] = [
            f"{slope / 1024:.0f} KiB per trial" for slope in slopes if slope > SLOPE_BYTES
        ]
        outcomes = query(self._url, "SELECT outcome, count(*) FROM tuner_trial GROUP BY outcome")
        return {
            "trials": self._trials,
            "seconds": seconds,
            "blows": dict(self.blows),
            "drivers_started": len(lives),
            "starts_refused": sum(driver.refused for driver in self.drivers),
            "outcomes": dict(outcomes),
            "slopes_bytes_per_trial": slopes,
            "most_descriptors": max((fds.total() for life in lives for _, _, fds in life.samples), default=0),
            "leaked_descriptors": leaked,
            "wrong": wrong,
        }


def _is_a(kind: str, command: str) -> bool:
    """Whether a command line is one of a trial, or of any supervisor."""
    supervises = "supervisor.py" in command
    return supervises if kind == "supervisor" else not supervises and "tuner.execution.worker" in command


def leaks(folder: Path, trials: int) -> dict[str, Any]:
    """Run trials one at a time that leave 300 MiB behind; return how far their baselines are apart."""
    url = f"sqlite:///{folder}/tuner.db"
    command = [
        *(sys.executable, "-P", "-m", "tuner", "run", str(SOAKED), "--trials", str(trials)),
        *("--jobs", "1", "--threads", "1", "--seed", "1", "--keep-checkpoints", "none"),
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env=clean_environment(SOAKED_MIB="300"),
        capture_output=True,
        text=True,
        check=False,
    )
    rows = query(url, "SELECT baseline_bytes, outcome FROM tuner_trial ORDER BY number")
    baselines = [row[0] for row in rows]
    furthest = max((abs(size - baselines[0]) for size in baselines), default=0)
    wrong = [] if done.returncode == 0 else [done.stderr[-2000:]]
    wrong += [f"{furthest} bytes from the first's"] if furthest > BASELINE_BYTES else []
    wrong += [] if [row[1] for row in rows] == ["completed"] * trials else ["not all are completed"]
    return {
        "trials": trials,
        "baseline_bytes": baselines,
        "furthest_bytes": furthest,
        "wrong": {"trials start alike": wrong},
    }


def soak(
    *,
    trials: int,
    seed: int,
    database: str,
    progress: Callable[[str], None] = lambda text: None,
    first: Sequence[str] = (),
) -> dict[str, Any]:
    """Run one study under fire, in a folder and on a database of its own; see `Soak`."""
    with contextlib.ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="tuner-soak-")))
        server = closing.enter_context(Server()) if database == "postgresql" else None
        url = server.url if server is not None else f"sqlite:///{folder}/tuner.db"
        return Soak(folder, url, trials=trials, seed=seed, server=server, first=first).run(progress)


def clean_environment(**extra: str) -> dict[str, str]:
    """Return this process's environment without settings of ours, and with `extra`."""
    return {**{key: value for key, value in os.environ.items() if not key.startswith("TUNER_")}, **extra}


def main() -> None:
    """Print what was done and what is wrong; write the JSON; exit with 1 when anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--leaks", type=int, default=200, help="trials in a row that leave 300 MiB behind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--database", choices=["postgresql", "sqlite"], default="postgresql")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    def progress(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    found: dict[str, Any] = {"seed": arguments.seed, "database": arguments.database}
    if arguments.trials:
        found["soak"] = soak(
            trials=arguments.trials, seed=arguments.seed, database=arguments.database, progress=progress
        )
    if arguments.leaks:
        with tempfile.TemporaryDirectory(prefix="tuner-leaks-") as folder:
            found["leaks"] = leaks(Path(folder), arguments.leaks)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2))
    sys.exit(_print(found))


def _print(found: dict[str, Any]) -> int:
    """Print the report; return the exit code."""
    if "soak" in found:
        part = found["soak"]
        print(
            f"{part['trials']} trials in {part['seconds']:.0f} s on {found['database']}: {part['outcomes']}"
        )
        print(
            f"struck: {part['blows']}; drivers started: {part['drivers_started']}, "
            f"refused at their start by a database that was away: {part['starts_refused']}"
        )
        kib = [round(slope / 1024, 1) for slope in part["slopes_bytes_per_trial"]]
        print(f"drivers' growth, KiB per trial: {kib or 'none lived long enough'}")
        print(f"most descriptors: {part['most_descriptors']}")
    if "leaks" in found:
        part = found["leaks"]
        print(
            f"{part['trials']} trials that leave 300 MiB behind: baselines at most "
            f"{part['furthest_bytes'] / MIB:.2f} MiB from the first's"
        )
    wrong = {
        name: list_
        for part in ("soak", "leaks")
        for name, list_ in found.get(part, {}).get("wrong", {}).items()
    }
    for name, problems in wrong.items():
        print(f"  {'ok   ' if not problems else 'WRONG'} {name}")
        for problem in problems[:20]:
            print(f"          {problem}")
    return int(any(wrong.values()))


if __name__ == "__main__":
    main()
