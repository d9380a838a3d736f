"""Opening a study: everything that can be wrong is found before anything is written.

::

    workload, target, budget, storage ──checked──► Plan ──open_session()──► Session
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tuner
from tuner.errors import UsageError
from tuner.memory.predictor import Predictor
from tuner.processes import this_process
from tuner.scheduling.devices import Place, check_budget, choose_places, joint_target, present_target
from tuner.search.environment import driver_environment
from tuner.search.optuna_study import OptunaStudy
from tuner.settings import Setting
from tuner.stand_in import check_memory_free, configuration
from tuner.store import migrations
from tuner.store.drivers import Drivers
from tuner.store.engine import URL, Engine, open_engine, parse_url, store_errors
from tuner.store.patience import patient
from tuner.store.reader import Reader
from tuner.store.reservations import Reservations
from tuner.store.rows import NewStudy, StudyRecord
from tuner.store.schema import NAME_LIMIT
from tuner.store.slots import Slots
from tuner.store.writer import Writer
from tuner.units import format_bytes, parse_bytes
from tuner.workload import LoadedWorkload, load_workload

Value = TypeVar("Value")
_CPU_JOBS = 4  # trials at once on a CPU, when no number is given


@dataclass(frozen=True)
class Plan:
    """A study as the user asked for it, checked, nothing written yet.

    Attributes:
        places: The devices that trials run on, of one model, the freest first.
        budget_bytes: Device bytes that one trial may take.
        pool_bytes: Device bytes that all trials on a device may take together; None: what is free.
        jobs: The most trials that run at once.
        threads: Intra-op threads of each.
    """

    loaded: LoadedWorkload
    places: tuple[Place, ...]
    name: str
    budget_bytes: int
    pool_bytes: int | None
    jobs: int
    single: bool
    seed: int | None
    threads: int
    runs_dir: Path
    url: URL
    settings: dict[str, Setting]
    existing: StudyRecord | None = None

    @property
    def place(self) -> Place:
        """The freest device, which stands for all: they are of one model."""
        return self.places[0]


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
    predictor: Predictor
    seed_base: int
    environment: dict[str, Any]
    outages: Outages

    def join_again(self) -> None:
        """Become a driver anew, after others have given this one up."""
        self.driver_id = self.drivers.join(self.study.id, this_process(), self.environment)


def make_plan(study_file: str, settings: dict[str, Setting], cores: int) -> Plan:
    """Check what the user asked for.

    Raises:
        UsageError: Something cannot be used as given.
    """
    values = {name: setting.value for name, setting in settings.items()}
    url = parse_url(values["storage"])
    loaded = load_workload(study_file)
    name = values["study_name"] or loaded.workload.study_name()
    if not name.isprintable():
        raise UsageError("a study's name is made of printable characters")
    if not name.strip() or len(name) > NAME_LIMIT:
        raise UsageError(f"a study's name has 1 to {NAME_LIMIT} characters, not {len(name)}")
    with store_errors(url):
        existing = _existing_study(url, name)
    # The freest GPU may be another one now: a study stays where it is.
    places = choose_places(values["target"] or (existing.target if existing is not None else None))
    budget_bytes = values["budget"]
    if budget_bytes is None and existing is not None:
        budget_bytes = existing.budget_bytes
    if budget_bytes is None:
        default = loaded.workload.default_budget
        budget_bytes = parse_bytes(default) if default else places[0].default_budget_bytes
        budget_bytes = min(budget_bytes, values["pool"] or budget_bytes)
    check_budget(budget_bytes, places[0])
    if values["pool"] is not None and values["pool"] < budget_bytes:
        raise UsageError(
            f"a pool of {format_bytes(values['pool'])} holds no trial of {format_bytes(budget_bytes)}",
            hint="give a --pool of at least the --budget, which is what one trial may take",
        )
    check_memory_free(loaded.workload)  # and a space that cannot be drawn from is found now
    jobs, threads = jobs_and_threads(
        places[0].kind,
        cores,
        jobs=values["jobs"],
        threads=values["threads"],
        seeded=(existing.seed if existing is not None else values["seed"]) is not None,
    )
    plan = Plan(
        loaded=loaded,
        places=places,
        name=name,
        budget_bytes=budget_bytes,
        pool_bytes=values["pool"],
        jobs=jobs,
        single=values["single"],
        seed=values["seed"],
        threads=threads,
        runs_dir=Path(values["runs_dir"]),
        url=url,
        settings=settings,
        existing=existing,
    )
    if existing is not None:
        _check_same(plan, existing)
    return plan


def jobs_and_threads(
    kind: str, cores: int, *, jobs: int | None, threads: int | None, seeded: bool
) -> tuple[int, int]:
    """Return how many trials may run at once, and the intra-op threads of each.

    On a GPU memory decides, as long as each trial has two cores: one to launch kernels, one to load
    data. On a CPU trials compete for the cores themselves, and more than four at once leave the
    sampler with little to learn from. A seeded study runs one at a time, so that it repeats.
    """
    if jobs is None:
        most = 1 if seeded else max(1, cores // 2) if kind == "cuda" else min(cores, _CPU_JOBS)
        jobs = max(1, min(most, cores // threads)) if threads else most
    return jobs, threads or max(1, cores // jobs)


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
        writer, reader, drivers = Writer(engine, outages), Reader(engine, outages), Drivers(engine, outages)
        study_id = writer.create_study(_new_study(plan, context_bytes))
        study = reader.study(plan.name)
        _check_same(plan, study)  # again: another driver may have created it, and its database is current
        environment = driver_environment(plan)
        driver_id = drivers.join(study_id, this_process(), environment)
        optuna_study = closing.enter_context(contextlib.closing(_optuna_study(plan, study, outages)))
        session = Session(
            plan=plan,
            study=study,
            driver_id=driver_id,
            engine=engine,
            writer=writer,
            reader=reader,
            optuna=optuna_study,
            drivers=drivers,
            slots=Slots(engine, outages),
            reservations=Reservations(engine, outages),
            predictor=predictor,
            seed_base=study.seed if study.seed is not None else random.SystemRandom().getrandbits(31),
            environment=environment,
            outages=outages,
        )
        reason = "failed"
        try:
            yield session
            reason = "done"
        finally:
            drivers.leave(session.driver_id, reason)


def _optuna_study(plan: Plan, study: StudyRecord, outages: Outages) -> OptunaStudy:
    return OptunaStudy(
        plan.url,
        study.name,
        maximize=study.maximize,
        single=study.single,
        seed=study.seed,
        parallel=plan.jobs > 1,
        patience=outages,
    )


def _predictor(plan: Plan) -> Predictor:
    return Predictor(
        plan.loaded.reference,
        present_target(plan.place.target).profile,
        log=plan.runs_dir / ".predictor" / "log.txt",
        threads=plan.threads,
    )


def _existing_study(url: URL, name: str) -> StudyRecord | None:
    """Return the study if the database has it, without changing or creating anything."""
    if url.drivername == "sqlite" and not Path(url.database or "").exists():
        return None
    engine = open_engine(url, read_only=True)
    try:
        migrations.refuse_foreign(migrations.current_revision(engine))
        return Reader(engine).find_study(name) if migrations.is_current(engine) else None
    finally:
        engine.dispose()


def _check_same(plan: Plan, study: StudyRecord) -> None:
    """Refuse to resume a study as something else.

    Raises:
        UsageError: The first difference, naming both sides.
    """
    objective = plan.loaded.workload.objective
    asked = {
        "workload": plan.loaded.identity,
        "target": _model(plan.place.target, plan.place.name),
        "budget": plan.budget_bytes if _was_asked(plan, "budget") else study.budget_bytes,
        "seed": _shown(plan.seed if _was_asked(plan, "seed") else study.seed),
        "objective": f"{objective.direction} {objective.metric}{' alone' if plan.single else ''}",
    }
    stored = {
        "workload": study.workload,
        "target": _model(study.target, study.device_name),
        "budget": study.budget_bytes,
        "seed": _shown(study.seed),
        "objective": f"{study.direction} {study.metric}{' alone' if study.single else ''}",
    }
    for what, value in asked.items():
        if value != stored[what]:
            shown = [format_bytes(v) if isinstance(v, int) else str(v) for v in (stored[what], value)]
            raise UsageError(
                f"study '{study.name}' has the {what} {shown[0]}, not {shown[1]}",
                hint="start a new study with another --study-name, or resume this one as it was",
            )


def _model(target: str, device_name: str | None) -> str:
    """Return what trials of one study share: any GPU of the same model will do, on any host."""
    return "cpu" if target == "cpu" else f"{target.partition(':')[0]} ({device_name})"


def _shown(seed: int | None) -> str:
    return "none" if seed is None else str(seed)


def _was_asked(plan: Plan, name: str) -> bool:
    return plan.settings[name].origin != "default"


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
