"""What the user asked for, checked before anything is written.

::

    workload, target, budget, storage ──make_plan()──► Plan ──open_session()──► Session
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.errors import UsageError
from tuner.scheduling.devices import Place, check_budget, choose_places
from tuner.search.known_points import Space, read_queue
from tuner.search.pruner_options import make_pruner
from tuner.search.pruning import NO_PRUNER, Pruner
from tuner.search.sampling.samplers import DEFAULT, MEMORY_AWARE, check_sampler, typed
from tuner.settings import Setting
from tuner.stand_in import check_memory_free
from tuner.store import migrations
from tuner.store.engine import URL, open_engine, parse_url, store_errors
from tuner.store.reader import Reader
from tuner.store.rows import StudyRecord
from tuner.store.schema import NAME_LIMIT
from tuner.units import format_bytes, parse_bytes
from tuner.workload import LoadedWorkload, load_workload

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
        sampler: The sampler's name.
        sampler_options: Its options.
        warm_start: Name of a study to learn from, or None.
        queue: Configurations to try first, each a part of one or a whole.
        pruner: When a trial is stopped early.
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
    sampler: str = DEFAULT
    sampler_options: Mapping[str, Any] = field(default_factory=dict)
    warm_start: str | None = None
    queue: tuple[Mapping[str, Any], ...] = ()

    @property
    def space(self) -> Space:
        """What the workload's `suggest` asks for."""
        return Space.of(self.loaded.workload)

    pruner: Pruner = NO_PRUNER

    @property
    def place(self) -> Place:
        """The freest device, which stands for all: they are of one model."""
        return self.places[0]


def make_plan(study_file: str, settings: dict[str, Setting], cores: int, queue: Path | None = None) -> Plan:
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
    sampler = values["sampler"] or (DEFAULT if values["single"] else MEMORY_AWARE)
    sampler_options = typed(values["sampler_option"])
    check_sampler(sampler, sampler_options, single=values["single"])
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
        sampler=sampler,
        sampler_options=sampler_options,
        warm_start=values["warm_start"],
        queue=tuple(read_queue(queue, Space.of(loaded.workload))) if queue is not None else (),
        pruner=make_pruner(values["pruner"], values["pruner_option"]),
    )
    if existing is not None:
        check_same(plan, existing)
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


def check_same(plan: Plan, study: StudyRecord) -> None:
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
