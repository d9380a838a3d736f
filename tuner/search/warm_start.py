"""What is known beforehand: `--warm-start OTHER` and `--enqueue FILE`.

Another study's trials inform the sampler, and its measurements the predictions. They are trials of the
Optuna study, marked, with the memory constraint of this study's budget; they are no trials of ours:
they count against nothing and are on no front.
"""

from __future__ import annotations

from optuna.trial import FrozenTrial, TrialState

from tuner.errors import UsageError
from tuner.search.known_points import Space, check_choices, translated
from tuner.search.optuna_storage import optuna_trials
from tuner.search.optuna_study import MEMORY
from tuner.search.sampling.history import WARM
from tuner.search.session import Session
from tuner.store.locks import exclusive
from tuner.store.rows import StudyRecord


def warm_study(session: Session) -> StudyRecord | None:
    """Return the study that this one was started warm from, if it is still there."""
    name = session.plan.warm_start or (session.study.settings.get("warm_start") or {}).get("value")
    return None if name is None else session.reader.find_study(name)


def take_in(session: Session) -> list[str]:
    """Take in what people know: another study's trials, and a queue; return what was done, in sentences.

    Raises:
        UsageError: The space has other choices than the study had, or nothing can be learned.
    """
    space = session.plan.space
    check_choices(session.study.name, session.optuna.trials(), space)
    done = [sentence] if (sentence := _warm_start(session, space)) else []
    if session.plan.queue:
        queued = session.optuna.enqueue(session.plan.queue)
        known = len(session.plan.queue) - queued
        done.append(
            f"{queued} configurations are queued" + (f", {known} were known already" if known else "")
        )
    return done


def _warm_start(session: Session, space: Space) -> str | None:
    """Take in the other study's trials, once; return what was done, as a sentence."""
    if session.plan.warm_start is None:
        return None
    other = session.reader.study(session.plan.warm_start)
    check_comparable(session.study, other)
    with exclusive(session.engine, f"study-{session.study.id}"):
        if any(WARM in trial.user_attrs for trial in session.optuna.trials()):
            return None
        trials = [trial for trial in optuna_trials(session.plan.url, other.name) if _says_something(trial)]
        taken = 0
        for trial, draw in translated(trials, space):
            session.optuna.add(
                draw,
                value=trial.values[0] if trial.state is TrialState.COMPLETE else None,
                memory_bytes=(1 + trial.constraints[MEMORY]) * other.budget_bytes,
                user_attrs={WARM: f"{other.name}/{trial.number}"},
            )
            taken += 1
    left = len(trials) - taken
    outside = f"; {left} lie outside of this space" if left else ""
    return f"{taken} trials of study '{other.name}' inform the search{outside}"


def check_comparable(study: StudyRecord, other: StudyRecord) -> None:
    """Check that one study can learn from another.

    Raises:
        UsageError: It is the same, or has another objective.
    """
    if other.id == study.id:
        raise UsageError(f"study '{study.name}' cannot be started warm from itself")
    if (other.metric, other.direction) != (study.metric, study.direction):
        raise UsageError(
            f"study '{other.name}' has the objective {other.direction} {other.metric}, "
            f"not {study.direction} {study.metric}",
            hint="a study can learn from one with the same objective",
        )


def _says_something(trial: FrozenTrial) -> bool:
    return trial.state in (TrialState.COMPLETE, TrialState.PRUNED) and MEMORY in trial.constraints
