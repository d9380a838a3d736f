"""Opening a study: everything that can be wrong is found before anything is written.

::

    workload, target, budget, storage ──checked──► Plan ──open_session()──► Session
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tuner
from tuner.errors import UsageError
from tuner.memory.predictor import Predictor
from tuner.processes import this_process
from tuner.records import Owner
from tuner.scheduling.devices import Place, check_budget, choose_place, present_target
from tuner.search.optuna_study import OptunaStudy
from tuner.settings import Setting
from tuner.stand_in import check_memory_free, configuration
from tuner.store import migrations
from tuner.store.engine import URL, open_engine, parse_url, store_errors
from tuner.store.reader import Reader
from tuner.store.rows import NewStudy, StudyRecord
from tuner.store.schema import NAME_LIMIT
from tuner.store.writer import Writer
from tuner.units import format_bytes, parse_bytes
from tuner.workload import LoadedWorkload, load_workload


@dataclass(frozen=True)
class Plan:
    """A study as the user asked for it, checked, nothing written yet."""

    loaded: LoadedWorkload
    place: Place
    name: str
    budget_bytes: int
    single: bool
    seed: int | None
    threads: int
    runs_dir: Path
    url: URL
    settings: dict[str, Setting]
    existing: StudyRecord | None = None


@dataclass(frozen=True)
class Session:
    """A study that this process drives.

    Attributes:
        plan: What was asked for.
        study: The study as stored.
        owner: This process.
        writer, reader, optuna: The two sides of the database.
        predictor: Estimates configurations.
        seed_base: Trials are seeded from this and their number.
    """

    plan: Plan
    study: StudyRecord
    owner: Owner
    writer: Writer
    reader: Reader
    optuna: OptunaStudy
    predictor: Predictor
    seed_base: int


def make_plan(study_file: str, settings: dict[str, Setting], threads: int) -> Plan:
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
    place = choose_place(values["target"] or (existing.target if existing is not None else None))
    budget_bytes = values["budget"]
    if budget_bytes is None:
        default = loaded.workload.default_budget
        budget_bytes = parse_bytes(default) if default else place.default_budget_bytes
    check_budget(budget_bytes, place)
    check_memory_free(loaded.workload)  # and a space that cannot be drawn from is found now
    plan = Plan(
        loaded=loaded,
        place=place,
        name=name,
        budget_bytes=budget_bytes,
        single=values["single"],
        seed=values["seed"],
        threads=values["threads"] or threads,
        runs_dir=Path(values["runs_dir"]),
        url=url,
        settings=settings,
        existing=existing,
    )
    if existing is not None:
        _check_same(plan, existing)
    return plan


@contextmanager
def open_session(plan: Plan) -> Iterator[Session]:
    """Open the store, create or resume the study, and hold it while the body runs.

    Raises:
        UsageError: The study exists with another workload, budget, target or objective.
        StoreError: The database cannot be used, or another driver holds the study.
    """
    with store_errors(plan.url), contextlib.ExitStack() as closing:
        predictor = closing.enter_context(_predictor(plan))
        context_bytes = None
        if plan.place.kind == "cpu" and plan.existing is None:
            context_bytes = predictor.context_bytes(configuration(plan.loaded.workload, {}))
        engine = open_engine(plan.url)
        migrations.upgrade(engine)
        writer, reader, owner = Writer(engine), Reader(engine), this_process()
        study_id = writer.create_study(_new_study(plan, context_bytes))
        writer.claim_study(study_id, owner)
        try:
            study = reader.study(plan.name)
            _check_same(plan, study)  # again, now that it is held and its database is current
            optuna_study = closing.enter_context(contextlib.closing(_optuna_study(plan, study)))
            seed_base = study.seed if study.seed is not None else random.SystemRandom().getrandbits(31)
            yield Session(plan, study, owner, writer, reader, optuna_study, predictor, seed_base)
        finally:
            writer.release_study(study_id, owner)
            engine.dispose()


def _optuna_study(plan: Plan, study: StudyRecord) -> OptunaStudy:
    return OptunaStudy(plan.url, study.name, maximize=study.maximize, single=study.single, seed=study.seed)


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
        "target": plan.place.target,
        "budget": plan.budget_bytes if _was_asked(plan, "budget") else study.budget_bytes,
        "seed": _shown(plan.seed if _was_asked(plan, "seed") else study.seed),
        "objective": f"{objective.direction} {objective.metric}{' alone' if plan.single else ''}",
    }
    stored = {
        "workload": study.workload,
        "target": study.target,
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
        target=plan.place.target,
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
