"""`tuner run`: search a study's space under a memory budget."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from tuner.cli.options import storage_option
from tuner.errors import Interrupted
from tuner.settings import resolve

if TYPE_CHECKING:
    from tuner.search.events import Stopper


@click.command("run", short_help="Search a study's space under a memory budget.")
@click.argument("study", metavar="STUDY")
@storage_option
@click.option(
    "--study-name", metavar="NAME", help="Create or resume this study  [default: the workload's name]"
)
@click.option("--budget", metavar="SIZE", help="Device bytes one trial may take, such as 700MiB or 6GiB.")
@click.option(
    "--trials", metavar="N", help="Launched trials in the study, earlier ones included  [default: 30]"
)
@click.option(
    "--target",
    metavar="DEVICE",
    help="cpu, cuda (every GPU of one model), cuda:N or cuda:N,M  [default: the best]",
)
@click.option("--jobs", metavar="N", help="The most trials that run at once  [default: as memory allows]")
@click.option(
    "--pool", metavar="SIZE", help="Device bytes all trials on a device may take  [default: what is free]"
)
@click.option("--single", is_flag=True, default=None, help="One objective; memory is a constraint only.")
@click.option("--seed", metavar="N", help="Make a CPU run repeatable: same params, verdicts and metrics.")
@click.option("--trial-timeout", metavar="TIME", help="Kill a trial after this, such as 90s or 15m.")
@click.option("--timeout", metavar="TIME", help="Start no further trial after this.")
@click.option(
    "--max-failures", metavar="N", help="Stop after more failed launches  [default: the first 3, or 20 %]"
)
@click.option("--audit", metavar="SHARE", help="At the end, launch this share (0 to 1) of what was pruned.")
@click.option("--threads", metavar="N", help="Intra-op threads of a trial  [default: all cores]")
@click.option("--runs-dir", metavar="DIR", help="Where run folders go  [default: tuner-runs]")
@click.option(
    "--keep-checkpoints", metavar="WHICH", help="Weights to keep: front, all or none  [default: front]"
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line per event instead of progress.")
def command(study: str, as_json: bool, **flags: Any) -> None:
    """Search the space of STUDY, a Python file with one workload, under a memory budget.

    Each configuration is predicted first, on fake tensors. What surely does not fit is pruned; the
    rest is trained, each trial in a process of its own under a hard cap, measured, and recorded.
    Several run at once as long as what is set aside for them fits the device together.

    The study is created, or resumed where it was: the same command continues it. Started again
    elsewhere while it runs, with the same --storage, it shares the work.

    Ctrl-C lets running trials finish, a second one stops them.

    \b
    Examples:
      tuner run studies/digits_cnn.py --budget 700MiB --trials 30
      tuner run my_study.py --target cuda:0,1 --budget 6GiB --jobs 8
      tuner run my_study.py --target cpu --single --seed 1
    """
    from tuner.cli.progress import make_observer, print_end
    from tuner.execution.launcher import LocalLauncher, visible_threads
    from tuner.scheduling.ledger import Ledger
    from tuner.scheduling.left_behind import left_behind, memory_now
    from tuner.search.checkpoints import prune_checkpoints
    from tuner.search.events import Goal, Stopper
    from tuner.search.loop import StudyLoop
    from tuner.search.plan import make_plan
    from tuner.search.recover import recover
    from tuner.search.session import Outages, open_session
    from tuner.store.file_systems import unsuitable_file_system

    settings = resolve(flags)
    value = {name: setting.value for name, setting in settings.items()}
    plan = make_plan(study, settings, visible_threads())
    goal = Goal(
        trials=value["trials"],
        max_failures=value["max_failures"],
        trial_timeout_seconds=value["trial_timeout"],
        timeout_seconds=value["timeout"],
        audit_share=value["audit"],
    )
    stopper = Stopper()
    interruption: Interrupted | None = None
    warning = unsuitable_file_system(plan.url)
    if warning is not None:
        click.echo(f"warning: {warning}", err=True)
    outages = Outages(should_give_up=lambda: stopper.level > 1)
    with _signals(stopper), open_session(plan, outages) as session:
        recovered = recover(session)
        before = memory_now(plan.places)
        with (
            LocalLauncher(plan.runs_dir, plan.loaded.reference, plan.place.kind) as launcher,
            make_observer(session, goal, as_json=as_json, recovered=recovered) as observer,
        ):
            session.predictor.on_warning = outages.on_wait = observer.note
            ledger = Ledger(session.reservations, plan.places, pool_bytes=plan.pool_bytes)
            loop = StudyLoop(session, launcher, ledger, observer=observer, goal=goal, stopper=stopper)
            try:
                loop.run()
            except Interrupted as error:
                interruption = error
            except Exception:
                # The trials in flight are settled now, as far as the database can still be written.
                with contextlib.suppress(Exception):
                    recover(session, own=True)
                raise
            recover(session, own=True)  # what was asked for twice, since an answer was lost on its way
            for sentence in left_behind(plan.places, before, session.reservations.all()):
                observer.note(sentence)
        prune_checkpoints(session.reader, session.writer, session.study, value["keep_checkpoints"])
        print_end(session, as_json=as_json)
    if interruption is not None:
        raise interruption


@contextmanager
def _signals(stopper: Stopper) -> Iterator[None]:
    """Let Ctrl-C stop gently, a second one at once, and SIGTERM at once."""

    def on_interrupt(number: int, frame: Any) -> None:
        if stopper.level == 0:
            click.echo("\nfinishing the running trials; Ctrl-C again stops them", err=True)
            stopper.stop(1, "interrupted")
        else:
            click.echo("\nstopping the running trials", err=True)
            stopper.stop(2, "interrupted")

    def on_terminate(number: int, frame: Any) -> None:
        stopper.stop(2, "terminated")

    previous = {
        signal.SIGINT: signal.signal(signal.SIGINT, on_interrupt),
        signal.SIGTERM: signal.signal(signal.SIGTERM, on_terminate),
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
