"""A session whose predictions and trials are functions: the loop's own behaviour, without children."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from tuner.execution.launcher import Launcher
from tuner.execution.run_folder import Request, RunFolder, StopRequest
from tuner.memory.prediction import Estimate
from tuner.memory.predictor import Predictor
from tuner.processes import this_process
from tuner.records import Outcome, Peaks, TrialResult
from tuner.scheduling.devices import Place
from tuner.scheduling.ledger import Ledger
from tuner.search.events import Ended, Goal, Launched, Stopper
from tuner.search.loop import StudyLoop
from tuner.search.optuna_study import OptunaStudy
from tuner.search.plan import Plan
from tuner.search.pruning import NO_PRUNER, Pruner
from tuner.search.recover import recover
from tuner.search.sampling.history import remember
from tuner.search.session import Outages, Session
from tuner.settings import resolve
from tuner.store import migrations
from tuner.store.drivers import Drivers
from tuner.store.engine import open_engine, parse_url
from tuner.store.locks import exclusive
from tuner.store.reader import Reader
from tuner.store.rejections import Rejections
from tuner.store.reservations import Reservations
from tuner.store.rows import NewStudy
from tuner.store.slots import Slots
from tuner.store.writer import Writer
from tuner.units import GIB, MIB
from tuner.workload import LoadedWorkload, Maximize, Workload

CONTEXT = 400 * MIB
BUDGET = GIB


class Widths(Workload):
    """A width from 2 to 20, on which memory depends, and a rate, so that no two trials are the same."""

    objective = Maximize("score")

    def suggest(self, trial: Any) -> dict[str, Any]:
        return {"width": trial.suggest_int("width", 2, 20), "rate": trial.suggest_float("rate", 0, 1)}


class FunctionTrial:
    """A trial that has ended when it is first looked at."""

    pid = None

    def __init__(self, result: TrialResult) -> None:
        self._result = result

    def fileno(self) -> int:
        return -1

    def poll(self) -> TrialResult | None:
        return self._result

    def stop(self, request: StopRequest, *, grace_seconds: float) -> None:
        pass

    def kill(self) -> None:
        pass


class FunctionPredictor:
    """Predicts `allocated(params)` bytes above the context."""

    def __init__(self, allocated: Callable[[dict[str, Any]], int | None]) -> None:
        self._allocated = allocated

    def estimate(self, params: dict[str, Any]) -> Estimate:
        size = self._allocated(params)
        return Estimate(size, size, size, notes=() if size is not None else ("cannot be traced: so",))

    def cancel(self) -> None:
        pass


class FunctionLauncher:
    """Ends each trial with `result(params)`; keeps what was launched."""

    def __init__(self, result: Callable[[dict[str, Any]], TrialResult]) -> None:
        self._result = result
        self.launched: list[dict[str, Any]] = []

    def prepare(self) -> None:
        pass

    def start(self, folder: RunFolder, request: Request) -> FunctionTrial:
        folder.write_request(request)
        self.launched.append(request.params)
        return FunctionTrial(self._result(request.params))


class ToldTrial:
    """A trial that runs until it is told how it ends, is stopped or is killed."""

    pid = None

    def __init__(self, params: dict[str, Any], request: Request) -> None:
        self.params, self.request = params, request
        self.stopped: StopRequest | None = None
        self.killed = False
        self._result: TrialResult | None = None
        self._descriptor = os.eventfd(0)

    @property
    def running(self) -> bool:
        return self._result is None and not self.killed

    def ends(self, result: TrialResult) -> None:
        if self.running:
            self._result = result
            os.eventfd_write(self._descriptor, 1)

    def fileno(self) -> int:
        return self._descriptor

    def poll(self) -> TrialResult | None:
        return self._result

    def stop(self, request: StopRequest, *, grace_seconds: float) -> None:
        self.stopped = self.stopped or request
        if grace_seconds == 0:
            self.kill()
        self.ends(TrialResult(request.outcome))

    def kill(self) -> None:
        self.killed = self.killed or self.running


class ToldLauncher:
    """Starts trials that end when told, or by themselves after a time; several loops may share it.

    Attributes:
        trials: All that were started, in order.
        most: The most that ran at once: how many, and bytes reserved.
    """

    def __init__(self, result: Callable[[dict[str, Any]], TrialResult], seconds: float | None = None) -> None:
        self._result, self._seconds = result, seconds
        self._lock = threading.Lock()
        self.trials: list[ToldTrial] = []
        self.most = (0, 0)

    def prepare(self) -> None:
        pass

    def start(self, folder: RunFolder, request: Request) -> ToldTrial:
        folder.write_request(request)
        trial = ToldTrial(request.params, request)
        with self._lock:
            self.trials.append(trial)
            reserved = [one.request.reservation_bytes or 0 for one in self.running]
            self.most = max(self.most[0], len(reserved)), max(self.most[1], sum(reserved))
        if self._seconds is not None:
            timer = threading.Timer(self._seconds, self.end, [trial])
            timer.daemon = True
            timer.start()
        return trial

    @property
    def running(self) -> list[ToldTrial]:
        return [trial for trial in self.trials if trial.running]

    def end(self, trial: ToldTrial, result: TrialResult | None = None) -> None:
        """End a trial, by default as `result(params)` says."""
        trial.ends(result or self._result(trial.params))


class Watcher:
    """Keeps what an observer is told."""

    def __init__(self) -> None:
        self.trials: list[Ended] = []
        self.repeated: list[Ended] = []
        self.launches: list[Launched] = []
        self.waits: list[tuple[int, str]] = []
        self.notes: list[str] = []
        self.away: dict[int, int] = {}

    def turned_away(self, number: int, count: int) -> None:
        self.away[number] = count

    def waiting(self, number: int, reason: str) -> None:
        self.waits.append((number, reason))

    def launched(self, trial: Launched) -> None:
        self.launches.append(trial)

    def again(self, trial: Ended) -> None:
        self.repeated.append(trial)

    def ended(self, trial: Ended) -> None:
        self.trials.append(trial)

    def note(self, message: str) -> None:
        self.notes.append(message)


def fits(params: dict[str, Any]) -> int:
    """Return 36 MiB per unit of width: with the context, up to about 16 fit."""
    return int(params["width"]) * 36 * MIB


def completed(params: dict[str, Any]) -> TrialResult:
    """Return a result that is better for wider models, and measured as predicted."""
    peaks = Peaks(CONTEXT + fits(params) + 12 * MIB, "VmHWM", fits(params))
    return TrialResult(Outcome.COMPLETED, value=params["width"] / 20, peaks=peaks, seconds=1.0)


@contextmanager
def session_on(
    url_text: str,
    folder: Path,
    *,
    allocated: Callable[[dict[str, Any]], int | None] = fits,
    seed: int | None = None,
    single: bool = False,
    workload: Workload | None = None,
    jobs: int = 1,
    pool_bytes: int | None = None,
    sampler: str = "tpe",
    pruner: Pruner = NO_PRUNER,
    name: str = "widths",
    queue: tuple[dict[str, Any], ...] = (),
    warm_start: str | None = None,
) -> Iterator[Session]:
    """Open a study called `widths` as `tuner run` would."""
    url = parse_url(url_text)
    workload = workload or Widths()
    engine = open_engine(url)
    migrations.upgrade(engine)
    writer, reader, drivers = Writer(engine), Reader(engine), Drivers(engine)
    loaded = LoadedWorkload(workload, "widths.py:Widths", "widths:Widths", "0" * 64)
    plan = Plan(
        loaded=loaded,
        places=(Place("cpu", "a CPU", None, 64 * GIB, 32 * GIB),),
        name=name,
        budget_bytes=BUDGET,
        pool_bytes=pool_bytes,
        jobs=jobs,
        single=single,
        seed=seed,
        threads=1,
        runs_dir=folder / "runs",
        url=url,
        settings=resolve({}, ["trials"]),
        pruner=pruner,
        queue=queue,
        warm_start=warm_start,
    )
    new = NewStudy(
        name=name,
        workload=loaded.identity,
        workload_reference=loaded.reference,
        workload_digest=loaded.digest,
        target="cpu",
        device_name="a CPU",
        budget_bytes=BUDGET,
        metric="score",
        direction="maximize",
        single=single,
        seed=seed,
        context_bytes=CONTEXT,
        settings={},
        tuner_version="0",
    )
    study_id = writer.create_study(new)
    driver_id = drivers.join(study_id, this_process())
    with exclusive(engine, "optuna"):
        optuna_study = OptunaStudy(
            url,
            name,
            maximize=True,
            single=single,
            seed=seed,
            budget_bytes=BUDGET,
            parallel=jobs > 1,
            sampler=sampler,
        )
    predictor = cast("Predictor", FunctionPredictor(allocated))
    session: Session | None = None
    try:
        study = reader.study(name)
        session = Session(
            plan=plan,
            study=study,
            driver_id=driver_id,
            engine=engine,
            writer=writer,
            reader=reader,
            optuna=optuna_study,
            drivers=drivers,
            slots=Slots(engine),
            reservations=Reservations(engine),
            rejections=Rejections(engine),
            predictor=predictor,
            seed_base=seed or 7,
            environment={},
            outages=Outages(),
        )
        recover(session)
        remember(optuna_study.history, reader.trials(study_id), session.rejections.all(study_id))
        yield session
    finally:
        optuna_study.close()
        drivers.leave(session.driver_id if session else driver_id, "done")
        engine.dispose()


def run_loop(
    session: Session,
    goal: Goal,
    result: Callable[[dict[str, Any]], TrialResult] = completed,
    stopper: Stopper | None = None,
) -> tuple[FunctionLauncher, Watcher]:
    """Run the loop; return what was launched and what was seen."""
    launcher, watcher = FunctionLauncher(result), Watcher()
    ledger = Ledger(session.reservations, session.plan.places, pool_bytes=session.plan.pool_bytes)
    loop = StudyLoop(session, launcher, ledger, observer=watcher, goal=goal, stopper=stopper or Stopper())
    loop.run()
    return launcher, watcher


@contextmanager
def flying(
    session: Session, goal: Goal, launcher: Launcher, stopper: Stopper | None = None
) -> Iterator[tuple[Future[None], Watcher]]:
    """Run the loop in a thread while the body looks on and tells trials how they end."""
    watcher, stopper = Watcher(), stopper or Stopper()
    ledger = Ledger(session.reservations, session.plan.places, pool_bytes=session.plan.pool_bytes)
    loop = StudyLoop(session, launcher, ledger, observer=watcher, goal=goal, stopper=stopper)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(loop.run)
        try:
            yield future, watcher
        finally:
            stopper.stop(2, "the test is over")  # of no effect on a loop that has ended


def wait_until(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait until something holds; fail after a while."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


def failing(outcome: Outcome) -> Callable[[dict[str, Any]], TrialResult]:
    """Return a result function that ends every trial with `outcome`."""
    return lambda params: dataclasses.replace(completed(params), outcome=outcome, value=None)
