"""What a trial was measured by goes into its columns and comes back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tuner.measure.timeline import MOST_POINTS
from tuner.records import EpochMetrics, Outcome, Peaks, TrialResult

if TYPE_CHECKING:
    from tests.store.conftest import Store

POINTS = [[place / 20, 10**10 + place, place % 2] for place in range(MOST_POINTS)]
TIMELINE = {"phases": ["train", "eval"], "points": POINTS}
MEASURED = TrialResult(
    Outcome.COMPLETED,
    value=1.0,
    epochs=(EpochMetrics(1, {"loss": 0.5}, 1.0, 9, 8, 7, 6), EpochMetrics(2, {"loss": 0.4}, 2.0)),
    peaks=Peaks(10**12, "torch.cuda", 5, 4, 3, {}, used_before_bytes=2, device_wide_bytes=10**12 + 1),
    growth_bytes=4096,
    timeline=TIMELINE,
)


def test_measurements_are_stored_and_read(store: Store) -> None:
    study_id = store.study()
    trial_id = store.trial(study_id)
    store.writer.record_result(trial_id, TrialResult.from_json(json.loads(json.dumps(MEASURED.to_json()))))

    trial = store.reader.trial(study_id, 0)

    assert trial.timeline == TIMELINE
    assert (trial.used_before_bytes, trial.device_wide_bytes, trial.growth_bytes) == (2, 10**12 + 1, 4096)
    first, second = store.reader.metrics(trial_id)
    assert (first.epoch_peak_bytes, first.epoch_allocated_bytes, first.epoch_reserved_bytes) == (8, 7, 6)
    assert (second.epoch_peak_bytes, second.epoch_allocated_bytes) == (None, None)
    assert store.sql("SELECT growth_bytes FROM tuner_trials") == [(4096,)]


def test_a_list_of_trials_reads_no_timelines(store: Store) -> None:
    study_id = store.study()
    store.writer.record_result(store.trial(study_id), MEASURED)
    assert [trial.timeline for trial in store.reader.trials(study_id)] == [None]


def test_what_was_not_measured_is_null(store: Store) -> None:
    study_id = store.study()
    store.writer.record_result(store.trial(study_id), TrialResult(Outcome.LOST))
    columns = "timeline, growth_bytes, used_before_bytes, device_wide_bytes"
    assert store.sql(f"SELECT {columns} FROM tuner_trial") == [(None,) * 4]
    assert store.sql("SELECT count(*) FROM tuner_trial WHERE timeline IS NULL") == [(1,)]
