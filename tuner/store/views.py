"""The views that people query: their names, columns and meanings are kept from version to version.

They are written in the SQL that SQLite and PostgreSQL share, over our tables only. A view is
documented by its columns' meanings, which `docs/database.md` shows: those of the table's column of the
same name, or of `_MEANINGS` where the view makes it.
"""

from __future__ import annotations

from tuner.store import schema

# A front's point needs a finite value: ±inf and NaN cannot be compared with memory. NaN is larger
# than every number to PostgreSQL and NULL to SQLite, so that the bound (the largest finite double)
# leaves it out on both.
LARGEST_DOUBLE = "1.7976931348623157e308"
# Outcomes whose measured peak is all that the trial would have taken.
_RAN = "('completed', 'pruned_metric')"


def front_query(source: str, memory: str, condition: str) -> str:
    """Return the query for the points that no other beats in both value and memory; ties are all kept.

    Memory is in whole bytes: what is up to 1 below a row's is less than the row's.

    Args:
        source: A view with the columns of `tuner_trials`.
        memory: Its column of memory.
        condition: What is looked at, as SQL; each study is taken for itself.
    """
    return f"""
    SELECT * FROM (
        SELECT candidates.*,
               max(score) OVER (PARTITION BY study_id ORDER BY {memory}
                   RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS best_up_to_here,
               max(score) OVER (PARTITION BY study_id ORDER BY {memory}
                   RANGE BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS best_below
        FROM (
            SELECT t.*, CASE WHEN direction = 'maximize' THEN value ELSE -value END AS score
            FROM {source} t
            WHERE outcome = 'completed' AND abs(value) <= {LARGEST_DOUBLE} AND {condition}
        ) candidates
    ) compared
    WHERE score = best_up_to_here AND (best_below IS NULL OR score > best_below)"""


VIEWS = {
    "tuner_trials": """
CREATE VIEW tuner_trials AS
SELECT s.name AS study, t.number, coalesce(t.outcome, 'running') AS outcome, t.value, s.metric,
       s.direction, t.peak_bytes, t.predicted_bytes, t.predicted_low_bytes, t.predicted_high_bytes,
       t.allocated_bytes, t.predicted_allocated_bytes, t.reserved_bytes, t.baseline_bytes,
       t.growth_bytes, t.host_peak_bytes, t.device, t.reservation_bytes, t.attempt, t.waiting_seconds,
       s.budget_bytes, t.verdict, t.fits_probability, t.audit, t.params, t.metrics, t.reason,
       t.seconds, t.prediction_seconds, t.draws, t.rehearsal_seconds, t.asked_at, t.started_at,
       t.ended_at, t.run_folder, t.id AS trial_id,
       s.id AS study_id
FROM tuner_trial t JOIN tuner_study s ON s.id = t.study_id""",
    "tuner_rejections": """
CREATE VIEW tuner_rejections AS
SELECT s.name AS study, r.number, r.place, r.params, r.predicted_bytes, s.budget_bytes, r.reason,
       s.id AS study_id
FROM tuner_rejection r JOIN tuner_study s ON s.id = r.study_id""",
    "tuner_pareto": f"""
CREATE VIEW tuner_pareto AS
SELECT study, number, value, metric, direction, peak_bytes, budget_bytes, params, trial_id, study_id
FROM ({front_query("tuner_trials", "peak_bytes", "peak_bytes <= budget_bytes")}) ranked""",
    "tuner_predictions": f"""
CREATE VIEW tuner_predictions AS
SELECT s.name AS study, t.number, coalesce(t.outcome, 'running') AS outcome, s.target, t.mix,
       t.verdict, t.fits_probability, t.predicted_bytes, t.predicted_low_bytes,
       t.predicted_high_bytes, t.peak_bytes,
       CASE WHEN t.outcome IN {_RAN} AND t.peak_bytes > 0
            THEN CAST(t.predicted_bytes AS double precision) / t.peak_bytes - 1 END AS error,
       CASE WHEN t.outcome IN {_RAN}
            THEN t.peak_bytes BETWEEN t.predicted_low_bytes AND t.predicted_high_bytes
            END AS in_band,
       t.predicted_allocated_bytes, t.allocated_bytes,
       CASE WHEN t.outcome IN {_RAN} AND t.allocated_bytes > 0
            THEN CAST(t.predicted_allocated_bytes AS double precision) / t.allocated_bytes - 1
            END AS allocated_error,
       t.audit,
       CASE WHEN t.audit AND t.outcome IS NOT NULL
            THEN t.outcome = 'completed' AND t.peak_bytes <= s.budget_bytes END AS wrongly_pruned,
       s.budget_bytes, t.prediction_seconds, t.asked_at, t.id AS trial_id, s.id AS study_id
FROM tuner_trial t JOIN tuner_study s ON s.id = t.study_id
WHERE t.predicted_bytes IS NOT NULL""",
    "tuner_memory": """
CREATE VIEW tuner_memory AS
SELECT s.name AS study, t.number, coalesce(t.outcome, 'running') AS outcome, p.key AS phase,
       CAST(CAST(p.value AS text) AS bigint) AS phase_bytes, t.peak_bytes, t.peak_source,
       t.baseline_bytes, t.reservation_bytes, s.budget_bytes, t.id AS trial_id, s.id AS study_id
FROM tuner_trial t JOIN tuner_study s ON s.id = t.study_id, json_each(t.phases) p""",
    "tuner_metrics": """
CREATE VIEW tuner_metrics AS
SELECT s.name AS study, t.number, coalesce(t.outcome, 'running') AS outcome, m.epoch, m.name, m.value,
       m.seconds, m.peak_bytes, m.epoch_peak_bytes, m.epoch_allocated_bytes, m.epoch_reserved_bytes,
       t.id AS trial_id, s.id AS study_id
FROM tuner_metric m JOIN tuner_trial t ON t.id = m.trial_id JOIN tuner_study s ON s.id = t.study_id""",
    "tuner_devices": """
CREATE VIEW tuner_devices AS
SELECT t.device, d.host, s.name AS study, t.number, coalesce(t.outcome, 'running') AS outcome,
       t.started_at, t.ended_at, t.seconds, t.waiting_seconds, t.reservation_bytes, t.peak_bytes,
       t.used_before_bytes, t.device_wide_bytes, t.attempt, s.budget_bytes, t.id AS trial_id,
       s.id AS study_id
FROM tuner_trial t JOIN tuner_study s ON s.id = t.study_id LEFT JOIN tuner_driver d ON d.id = t.driver_id
WHERE t.started_at IS NOT NULL""",
}

SAYS = {
    "tuner_trials": "a row per trial, with its study",
    "tuner_pareto": "the trials on each study's front: no other has a better value in no more memory",
    "tuner_rejections": "what the filter turned away before a trial was spent",
    "tuner_predictions": "a row per trial with a prediction: predicted against measured",
    "tuner_memory": "a row per trial and phase: measured peaks",
    "tuner_metrics": "a row per trial, epoch and metric",
    "tuner_devices": "a row per launched trial: which device it held, when, and how much of it",
}
_TABLES = {
    "tuner_rejections": (schema.rejection, schema.study),
    "tuner_metrics": (schema.metric, schema.trial, schema.study),
}
_MEANINGS = {
    "study": "the study's name",
    "study_id": "tuner_study.id",
    "trial_id": "tuner_trial.id",
    "outcome": "what became of it; running while it has none",
    "error": "predicted / measured device bytes - 1, of trials that ran to their end or were stopped early",
    "in_band": "whether the measured peak lies within the predicted band (0 or 1 on SQLite)",
    "allocated_error": "the same as error, of live blocks",
    "wrongly_pruned": "of audits: whether it did fit (0 or 1 on SQLite)",
    "asked_at": "when its configuration was asked for",
    "started_at": "when it was launched",
    "ended_at": "when it ended",
    "phase": "setup, train, eval, …",
    "phase_bytes": "measured peak device bytes within the phase",
    "name": "the metric",
}
# The column of one view means something else than in other views.
_OF_VIEW = {("tuner_metrics", "value"): "at the end of the epoch; NULL for NaN"}


def meaning_of(view: str, column: str) -> str:
    """Return what a view's column means; empty where nothing says so."""
    if (view, column) in _OF_VIEW:
        return _OF_VIEW[view, column]
    if column in _MEANINGS:
        return _MEANINGS[column]
    tables = _TABLES.get(view, (schema.trial, schema.study, schema.driver))
    found = next((table.c[column] for table in tables if column in table.c), None)
    return "" if found is None else found.comment or ""


def unit_of(column: str) -> str:
    """Return a column's unit, which its name tells; empty where it has none."""
    if column.endswith("_bytes"):
        return "bytes"
    if column == "seconds" or column.endswith("_seconds"):
        return "seconds"
    if column.endswith("_at"):
        return "UTC"
    return "share" if column in ("error", "allocated_error", "fits_probability") else ""
