"""Draws by the expected gain of the feasible hypervolume: the score is modelled, memory is known.

A pool of draws (the inner sampler's, random ones, neighbours of the front) is ordered with modelled
memory; the best is traced, and taken when it still is the best with the memory that the trace says.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from tuner.search.sampling.encoding import Encoder
from tuner.search.sampling.history import Forecast, History, draw_of
from tuner.search.sampling.hypervolume import expected_gain, front_of
from tuner.search.sampling.models import ScoreModel, not_far_below
from tuner.search.sampling.rehearsal import Draw
from tuner.search.sampling.sources import Drawer, expected_bytes

Floats = NDArray[np.float64]

SCORES_NEEDED = 8  # completed trials before anything is expected of others
_FIRST_SCORES = 10
_INNER, _RANDOM, _NEIGHBOURS = 4, 128, 128
_CHANGED_SHARE = 0.25  # of a neighbour's values, at least one
_MOST_TRACED = 6  # fitting draws that are traced before the best of them is taken
_CLOSE = 0.9  # of the next one's modelled gain is enough


class Promising:
    """Draws for one trial of a study with two objectives, by expected gain.

    Args:
        drawer: Of the trial.
        history: What was traced.
        model: Of the scores; kept from trial to trial.
        budget_bytes: The reference point's memory.
        seed: Of the draws.
    """

    def __init__(
        self,
        drawer: Drawer,
        history: History,
        model: ScoreModel,
        *,
        budget_bytes: int,
        seed: int | None,
    ) -> None:
        self._drawer, self._history, self._model = drawer, history, model
        self._budget_bytes, self._seed = budget_bytes, 0 if seed is None else seed
        self._rng = np.random.default_rng(seed)
        self._scored = _scored(drawer)
        self._gains: dict[str, float] = {}
        self._fitting: list[tuple[float, Draw]] = []
        self._pool = self._ordered()
        self._given_back: Draw | None = None

    @staticmethod
    def is_ready(drawer: Drawer) -> bool:
        """Whether enough scores are known."""
        return len(_scored(drawer)) >= SCORES_NEEDED

    def draw(self) -> Draw | None:
        """Return the draw that promises most of those not traced yet."""
        if self._given_back is not None:
            draw, self._given_back = self._given_back, None
            return draw
        return self._pool.pop(0) if self._pool else None

    def takes(self, draw: Draw, forecast: Forecast) -> bool:
        """Take a draw that promises as much as the next one, now that its memory is known."""
        if forecast.memory_bytes is None or any(draw is seen for _, seen in self._fitting):
            return True
        gain = self._gain(draw, forecast.memory_bytes)
        self._fitting.append((gain, draw))
        best_gain, best = max(self._fitting, key=lambda pair: pair[0])
        following = self._gains[self._pool[0].key] if self._pool else 0.0
        if best_gain < _CLOSE * following and len(self._fitting) < _MOST_TRACED:
            return False
        if best is draw:
            return True
        self._given_back = best
        return False

    def _ordered(self) -> list[Draw]:
        pool = self._candidates()
        if not pool:
            return []
        self._learn(pool)
        memory = expected_bytes(self._history, pool, self._seed)
        if memory is None:
            memory = np.full(len(pool), float(self._budget_bytes) / 2)
        mean, deviation = self._model.expected(self._encoder.rows(pool))
        gains = self._gains_of(mean, deviation, memory)
        self._gains = {draw.key: float(gain) for draw, gain in zip(pool, gains, strict=True)}
        self._expected = {
            draw.key: (float(m), float(d)) for draw, m, d in zip(pool, mean, deviation, strict=True)
        }
        return [pool[index] for index in np.argsort(-gains, kind="stable")]

    def _candidates(self) -> list[Draw]:
        known = self._history.tried(self._drawer.study, self._drawer.trial.number) | self._history.rejected
        draws = [self._drawer.draw() for _ in range(_INNER)]
        draws += [self._drawer.draw_uniformly(self._rng) for _ in range(_RANDOM)]
        parents = [draw_of(trial) for trial in self._parents()]
        if parents:
            chosen = self._rng.integers(len(parents), size=_NEIGHBOURS)
            draws += [self._neighbour(parents[index]) for index in chosen]
        found = {draw.key: draw for draw in draws if draw.key not in known}
        return list(found.values())

    def _neighbour(self, parent: Draw) -> Draw:
        names = list(parent.answers)
        changed = self._rng.random(len(names)) < _CHANGED_SHARE
        changed[self._rng.integers(len(names))] = True
        kept = {name: parent.answers[name] for name, is_new in zip(names, changed, strict=True) if not is_new}
        return self._drawer.draw_uniformly(self._rng, kept)

    def _parents(self) -> list[FrozenTrial]:
        """Return the trials of the front, and a few of the best ones beside it."""
        fitting = [trial for trial in self._scored if _memory(trial) <= self._budget_bytes]
        scores = np.array([_score(self._drawer, trial) for trial in fitting])
        memory = np.array([_memory(trial) for trial in fitting])
        on_front = set(front_of(memory, scores)[0])
        best = set(np.argsort(-scores)[:5]) if len(scores) else set()
        return [t for index, t in enumerate(fitting) if _memory(t) in on_front or index in best]

    def _learn(self, pool: list[Draw]) -> None:
        """Fit the score's model; a trial that runs counts as ending as it is expected to."""
        draws = [draw_of(trial) for trial in self._scored]
        running = [
            trial
            for trial in self._drawer.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            if trial.number != self._drawer.trial.number and trial.params
        ]
        pending = [draw_of(trial) for trial in running]
        self._encoder = Encoder([*draws, *pending, *pool])
        rows = self._encoder.rows(draws)
        scores = np.array([_score(self._drawer, trial) for trial in self._scored])
        # Of the first ones, which were random: the median of all would rise as the search gets better.
        self._worst = float(np.median(scores[:_FIRST_SCORES]))
        scores = not_far_below(scores, self._worst)
        memory = np.array([_memory(trial) for trial in self._scored])
        self._model.fit(rows, scores)
        if pending:
            expected = self._model.expected(self._encoder.rows(pending))[0]
            sizes = expected_bytes(self._history, pending, self._seed)
            if sizes is None:
                sizes = np.full(len(pending), float(self._budget_bytes))
            rows = np.vstack([rows, self._encoder.rows(pending)])
            scores, memory = np.concatenate([scores, expected]), np.concatenate([memory, sizes])
            self._model.condition(rows, scores)
        fitting = memory <= self._budget_bytes
        self._front = front_of(memory[fitting], scores[fitting])

    def _gain(self, draw: Draw, memory_bytes: int) -> float:
        mean, deviation = self._expected[draw.key]
        return float(self._gains_of(np.array([mean]), np.array([deviation]), np.array([memory_bytes]))[0])

    def _gains_of(self, mean: Floats, deviation: Floats, memory: Floats) -> Floats:
        return expected_gain(
            mean,
            deviation,
            memory.astype(np.float64),
            front=self._front,
            worst_score=self._worst,
            budget=float(self._budget_bytes),
        )


def _scored(drawer: Drawer) -> list[FrozenTrial]:
    """Return the completed trials with finite values, in order."""
    trials = drawer.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return [trial for trial in trials if np.isfinite(trial.values).all()]


def _score(drawer: Drawer, trial: FrozenTrial) -> float:
    value = float(trial.values[0])
    return value if drawer.study.directions[0] is StudyDirection.MAXIMIZE else -value


def _memory(trial: FrozenTrial) -> float:
    return float(trial.values[1])
