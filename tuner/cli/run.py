"""`tuner run`: search a study's space under a memory budget."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tuner.cli.options import joined, storage_option
from tuner.errors import Interrupted
from tuner.settings import resolve

if TYPE_CHECKING:
    from tuner.execution.launcher import LocalLauncher
    from tuner.search.events import Goal, Observer, Stopper
    from tuner.search.plan import Plan
    from tuner.search.session import Session


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
@click.option(
    "--sampler",
    metavar="NAME",
    help="How configurations are drawn: tpe, memory-aware, nsga2, nsga3, gp, cmaes, qmc, random"
    "  [default: memory-aware; with --single tpe]",
)
@click.option(
    "--sampler-option", metavar="K=V", multiple=True, callback=joined, help="Set an option of it; repeatable."
)
@click.option(
    "--enqueue", metavar="FILE", help="JSON list of configurations, or parts of them, to try first."
)
@click.option("--warm-start", metavar="STUDY", help="Learn from the trials of another study.")
@click.option("--seed", metavar="N", help="Make a CPU run repeatable: same params, verdicts and metrics.")
@click.option("--trial-timeout", metavar="TIME", help="Kill a trial after this, such as 90s or 15m.")
@click.option("--timeout", metavar="TIME", help="Start no further trial after this.")
@click.option(
    "--max-failures", metavar="N", help="Stop after more failed launches  [default: the first 3, or 20 %]"
)
@click.option("--audit", metavar="SHARE", help="At the end, launch this share (0 to 1) of what was pruned.")
@click.option("--threads", metavar="N", help="Intra-op threads of a trial  [default: cores / jobs]")
@click.option("--runs-dir", metavar="DIR", help="Where run folders go  [default: tuner-runs]")
@click.option(
    "--keep-checkpoints", metavar="WHICH", help="Weights to keep: front, all or none  [default: front]"
)
@click.option("--pruner", metavar="NAME", help="Stop poor trials early: none, median, percentile or asha.")
@click.option(
    "--pruner-option", metavar="K=V", multiple=True, callback=joined, help="Set an option of it; repeatable."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line per event instead of progress.")
def command(study: str, as_json: bool, enqueue: str | None, **flags: Any) -> None:
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
    from tuner.execution.launcher import visible_threads
    from tuner.search.events import Goal, Stopper
    from tuner.search.plan import make_plan
    from tuner.store.file_systems import unsuitable_file_system

    settings = resolve(flags)
    value = {name: setting.value for name, setting in settings.items()}
    plan = make_plan(study, settings, visible_threads(), None if enqueue is None else Path(enqueue))
    goal = Goal(
        trials=value["trials"],
        max_failures=value["max_failures"],
        trial_timeout_seconds=value["trial_timeout"],
        timeout_seconds=value["timeout"],
        audit_share=value["audit"],
    )
    warning = unsuitable_file_system(plan.url)
    if warning is not None:
        click.echo(f"warning: {warning}", err=True)
    stopper = Stopper()
    with _signals(stopper):
        _drive(plan, goal, stopper, keep=value["keep_checkpoints"], as_json=as_json)


def _drive(plan: Plan, goal: Goal, stopper: Stopper, *, keep: str, as_json: bool) -> None:
    """Drive the study to its goal, and show what came of it."""
    from tuner.cli.progress import make_observer, print_end
    from tuner.cli.unbreakable import Unbreakable
    from tuner.execution.launcher import LocalLauncher
    from tuner.scheduling.left_behind import left_behind, memory_now
    from tuner.search.checkpoints import prune_checkpoints
    from tuner.search.recover import recover
    from tuner.search.session import Outages, open_session
    from tuner.search.warm_start import take_in

    outages = Outages(should_give_up=lambda: stopper.level > 1)
    interruption: Interrupted | None = None
    with open_session(plan, outages) as session:
        recovered = outages(lambda: recover(session))
        before = memory_now(plan.places)
        with (
            LocalLauncher(plan.runs_dir, plan.loaded.reference, plan.place.kind) as launcher,
            make_observer(session, goal, as_json=as_json, recovered=recovered) as printer,
        ):
            observer = Unbreakable(printer)
            session.predictor.on_warning = outages.on_wait = observer.note
            for sentence in take_in(session):
                observer.note(sentence)
            interruption = _run_loop(session, launcher, observer, goal=goal, stopper=stopper)
            for sentence in left_behind(plan.places, before, session.reservations.all()):
                observer.note(sentence)
        prune_checkpoints(session.reader, session.writer, session.study, keep)
        print_end(session, as_json=as_json)
    if interruption is not None:
        raise interruption


def _run_loop(
    session: Session, launcher: LocalLauncher, observer: Observer, *, goal: Goal, stopper: Stopper
) -> Interrupted | None:
    """Run the study's loop; return that it was interrupted, if it was, with every trial settled."""
    from tuner.scheduling.ledger import Ledger
    from tuner.search.loop import StudyLoop
    from tuner.search.recover import recover

    interruption = None
    ledger = Ledger(session.reservations, session.plan.places, pool_bytes=session.plan.pool_bytes)
    try:
        StudyLoop(session, launcher, ledger, observer=observer, goal=goal, stopper=stopper).run()
    except Interrupted as error:
        interruption = error
    except Exception:
        # The trials in flight are settled now, as far as the database can still be written.
        with contextlib.suppress(Exception):
            recover(session, own=True)
        raise
    # What was asked of Optuna twice, since an answer was lost on its way, is settled too.
    session.outages(lambda: recover(session, own=True))
    return interruption


@contextmanager
def _signals(stopper: Stopper) -> Iterator[None]:
    """Let Ctrl-C stop gently, a second one at once, as do SIGTERM and a terminal that closes.

    Where no loop looks at the stopper, a signal ends the command. What is printed here passes by
    Python's own buffers, in which the signal may have come; and the terminal may be gone.
    """

    def on_interrupt(number: int, frame: Any) -> None:
        stopper.stop(1 if stopper.level == 0 else 2, "interrupted")
        _end_now(stopper)
        words = "finishing the running trials; Ctrl-C again stops them"
        _tell(words if stopper.level == 1 else "stopping the running trials")

    def on_terminate(number: int, frame: Any) -> None:
        stopper.stop(2, "terminated")
        _end_now(stopper)

    handlers = {signal.SIGINT: on_interrupt, signal.SIGTERM: on_terminate}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        handlers[signal.SIGHUP] = on_terminate
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end_now(stopper: Stopper) -> None:
    if not stopper.heeded:
        raise Interrupted(stopper.reason, hint="the same command continues the study")


def _tell(words: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"\n{words}\n".encode())
