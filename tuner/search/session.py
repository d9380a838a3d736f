"""A study that this process drives: its database, its Optuna side, its predictor, its leases."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import tuner
from tuner.memory.predictor import Predictor
from tuner.processes import this_process
from tuner.scheduling.devices import joint_target, present_target
from tuner.search.environment import driver_environment
from tuner.search.optuna_study import OptunaStudy
from tuner.search.plan import Plan, check_same
from tuner.search.sampling.history import remember
from tuner.stand_in import configuration
from tuner.store import migrations
from tuner.store.drivers import Drivers
from tuner.store.engine import Engine, open_engine, store_errors
from tuner.store.locks import exclusive
from tuner.store.patience import patient
from tuner.store.reader import Reader
from tuner.store.rejections import Rejections
from tuner.store.reservations import Reservations
from tuner.store.rows import NewStudy, StudyRecord
from tuner.store.slots import Slots
from tuner.store.writer import Writer

Value = TypeVar("Value")


@dataclass
class Session:
    """A study that this process drives, beside others perhaps.

    Attributes:
        outages: How a database that is away is waited for.
        plan: What was asked for.
        study: The study as stored.
        driver_id: This process as a driver; another one after it was given up for lost.
        engine: The database, for locks.
        writer, reader, optuna: The two sides of the database.
        drivers, slots, reservations: Who drives, who may ask, what is set aside.
        rejections: What was turned away.
        predictor: Estimates configurations.
        seed_base: Trials are seeded from this and their number.
        environment: What is kept of this process.
    """

    plan: Plan
    study: StudyRecord
    driver_id: int
    engine: Engine
    writer: Writer
    reader: Reader
    optuna: OptunaStudy
    drivers: Drivers
    slots: Slots
    reservations: Reservations
    rejections: Rejections
    predictor: Predictor
    seed_base: int
    environment: dict[str, Any]
    outages: Outages

    def join_again(self) -> None:
        """Become a driver anew, after others have given this one up."""
        self.driver_id = self.drivers.join(self.study.id, this_process(), self.environment)


class Outages:
    """Waits for a database that is away: the store's `Patience`.

    Args:
        should_give_up: Asked while waiting; True ends it.

    Attributes:
        on_wait: Told, a sentence each, that the database is away, and that it is back.
    """

    def __init__(self, should_give_up: Callable[[], bool] = lambda: False) -> None:
        self._should_give_up = should_give_up
        self.on_wait: Callable[[str], None] = lambda message: None

    def __call__(self, call: Callable[[], Value], /) -> Value:
        """Return what the call returns, once the database is there."""
        return patient(call, on_wait=self.on_wait, should_give_up=self._should_give_up)


@contextmanager
def open_session(plan: Plan, outages: Outages) -> Iterator[Session]:
    """Open the store, create or resume the study, and drive it while the body runs.

    A database that cannot be reached at first is an error; one that goes away later is waited for.

    Raises:
        UsageError: The study exists with another workload, budget, target or objective.
        StoreError: The database cannot be used.
    """
    with store_errors(plan.url), contextlib.ExitStack() as closing:
        predictor = closing.enter_context(_predictor(plan))
        context_bytes = None
        if plan.place.kind == "cpu" and plan.existing is None:
            context_bytes = predictor.context_bytes(configuration(plan.loaded.workload, {}))
        engine = open_engine(plan.url)
        closing.callback(engine.dispose)
        migrations.upgrade(engine)
        study = _create_or_find(plan, Writer(engine, outages), Reader(engine, outages), context_bytes)
        drivers, environment = Drivers(engine, outages), driver_environment(plan)
        driver_id = drivers.join(study.id, this_process(), environment)
        try:
            with exclusive(engine, "optuna"):  # its tables cannot be created by two at once
                optuna_study = _optuna_study(plan, study, outages)
            closing.callback(optuna_study.close)
            session = Session(
                plan=plan,
                study=study,
                driver_id=driver_id,
                engine=engine,
                writer=Writer(engine, outages),
                reader=Reader(engine, outages),
                optuna=optuna_study,
                drivers=drivers,
                slots=Slots(engine, outages),
                reservations=Reservations(engine, outages),
                rejections=Rejections(engine, outages),
                predictor=predictor,
                seed_base=study.seed if study.seed is not None else random.SystemRandom().getrandbits(31),
                environment=environment,
                outages=outages,
            )
            remember(optuna_study.history, session.reader.trials(study.id), session.rejections.all(study.id))
            yield session
            driver_id = session.driver_id
        except BaseException:
            with contextlib.suppress(Exception):  # without patience: its death is noticed all the same
                Drivers(engine).leave(driver_id, "failed")
            raise
        drivers.leave(driver_id, "done")


def _create_or_find(plan: Plan, writer: Writer, reader: Reader, context_bytes: int | None) -> StudyRecord:
    """Return the study as stored, once it is certain that it is the one that was asked for."""
    writer.create_study(_new_study(plan, context_bytes))
    study = reader.study(plan.name)
    check_same(plan, study)  # again: another driver may have created it, and its database is current
    return study


def _optuna_study(plan: Plan, study: StudyRecord, outages: Outages) -> OptunaStudy:
    return OptunaStudy(
        plan.url,
        study.name,
        maximize=study.maximize,
        single=study.single,
        seed=study.seed,
        budget_bytes=study.budget_bytes,
        parallel=plan.jobs > 1,
        sampler=plan.sampler,
        sampler_options=plan.sampler_options,
        patience=outages,
    )


def _predictor(plan: Plan) -> Predictor:
    return Predictor(
        plan.loaded.reference,
        present_target(plan.place.target).profile,
        log=plan.runs_dir / ".predictor" / "log.txt",
        threads=plan.threads,
    )


def _new_study(plan: Plan, context_bytes: int | None) -> NewStudy:
    objective = plan.loaded.workload.objective
    settings = {name: setting.to_json() for name, setting in plan.settings.items() if name != "storage"}
    return NewStudy(
        name=plan.name,
        workload=plan.loaded.identity,
        workload_reference=plan.loaded.reference,
        workload_digest=plan.loaded.digest,
        target=joint_target(plan.places),
        device_name=plan.place.name,
        budget_bytes=plan.budget_bytes,
        metric=objective.metric,
        direction=objective.direction,
        single=plan.single,
        seed=plan.seed,
        context_bytes=context_bytes,
        settings=settings,
        tuner_version=tuner.__version__,
    )
