"""Our tables, beside Optuna's in the same database and prefixed `tuner_`.

Tables are singular, the views that people query are plural. The comment of each column is its
documentation. Non-finite numbers inside JSON columns are written as the strings "inf", "-inf" and
"nan", since PostgreSQL's JSON has no such numbers.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

NAME_LIMIT = 512  # characters in a study's name: what Optuna's own table holds
VERSION_TABLE = "tuner_alembic_version"

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


study = Table(
    "tuner_study",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String(NAME_LIMIT), nullable=False, unique=True, comment="also the Optuna study's name"),
    Column("workload", Text, nullable=False, comment="identity: file or module, and class"),
    Column("workload_reference", Text, nullable=False, comment="where the driver loaded it from"),
    Column("workload_digest", String(64), nullable=False, comment="SHA-256 of the study file at creation"),
    Column("target", String(64), nullable=False, comment="what predictions are for: cpu, cuda:0, a100-40gb"),
    Column("device_name", Text, comment="the device trials run on, as it names itself"),
    Column("budget_bytes", BigInteger, nullable=False, comment="device bytes one trial may take"),
    Column("metric", Text, nullable=False, comment="the objective's metric"),
    Column("direction", String(8), nullable=False, comment="maximize or minimize"),
    Column("single", Boolean, nullable=False, comment="true: one objective, memory is a constraint only"),
    Column("seed", BigInteger, comment="seed of sampler and trials, or NULL"),
    Column("context_bytes", BigInteger, comment="device bytes of a trial before its first tensor"),
    Column("settings", JSON, nullable=False, comment="resolved settings, each with its origin"),
    Column("created_at", DateTime(timezone=True), nullable=False, comment="UTC"),
    Column("tuner_version", String(32), nullable=False, comment="version that created the study"),
)

driver = Table(
    "tuner_driver",
    metadata,
    Column("id", Integer, primary_key=True, comment="also the fencing token of what it holds: ids only grow"),
    Column("token", String(36), nullable=False, unique=True, comment="chosen when it joins: a join repeats"),
    Column("study_id", ForeignKey(study.c.id, ondelete="CASCADE"), nullable=False, index=True),
    Column("host", String(255), nullable=False, comment="where it runs"),
    Column("boot_id", String(64), nullable=False, comment="boot of that host: a pid is unique within one"),
    Column("pid", Integer, nullable=False, comment="its process"),
    Column("started", String(32), nullable=False, comment="start of that process, in clock ticks since boot"),
    Column("joined_at", DateTime(timezone=True), nullable=False, comment="UTC, by the database's clock"),
    Column(
        "seen_at", DateTime(timezone=True), nullable=False, comment="last sign of life, by the same clock"
    ),
    Column(
        "back_at", DateTime(timezone=True), comment="when its signs of life came again after a gap, or NULL"
    ),
    Column("ended_at", DateTime(timezone=True), comment="when it left, or was given up; NULL while it works"),
    Column("end_reason", Text, comment="why it ended; 'lost' where others gave it up"),
    Column("stop_reason", Text, comment="set by `tuner stop`: it ends after its running trials"),
    Column(
        "environment", JSON, comment="command line, settings with origins, git commit, versions, GPU driver"
    ),
    sqlite_autoincrement=True,
)

rejection = Table(
    "tuner_rejection",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("study_id", ForeignKey(study.c.id, ondelete="CASCADE"), nullable=False),
    Column("number", Integer, nullable=False, comment="the trial that it was drawn for"),
    Column("place", Integer, nullable=False, comment="from 0, in the order of the draws"),
    Column("params", JSON, nullable=False, comment="the configuration"),
    Column(
        "answers", JSON(none_as_null=True), comment="what suggest() was answered, where params say otherwise"
    ),
    Column("predicted_bytes", BigInteger, comment="predicted device bytes, expected"),
    Column("reason", Text, nullable=False, comment="why it was turned away"),
    UniqueConstraint("study_id", "number", "place"),
)

trial = Table(
    "tuner_trial",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("study_id", ForeignKey(study.c.id, ondelete="CASCADE"), nullable=False, index=True),
    Column("number", Integer, nullable=False, comment="the Optuna trial's number, from 0"),
    Column(
        "repeats",
        Integer,
        comment="number of the interrupted trial whose params this one runs again",
    ),
    Column("audit", Boolean, nullable=False, comment="true: predicted not to fit, launched to check that"),
    Column("params", JSON, nullable=False, comment="the configuration"),
    Column("verdict", String(8), comment="launch, try or prune"),
    Column("fits_probability", Double, comment="P(required bytes <= budget)"),
    Column("predicted_bytes", BigInteger, comment="predicted device bytes, expected"),
    Column("predicted_low_bytes", BigInteger, comment="the same, 2.5 % quantile"),
    Column("predicted_high_bytes", BigInteger, comment="the same, 97.5 % quantile"),
    Column("predicted_allocated_bytes", BigInteger, comment="predicted peak of the allocator's live blocks"),
    Column("mix", String(32), comment="the mix of operators: trials of the same mix calibrate one another"),
    Column("prediction", JSON, comment="the whole prediction, as `tuner predict -f json` prints it"),
    Column("reservation_bytes", BigInteger, comment="the cap the trial ran under"),
    Column("device", String(255), comment="the device it ran on: a GPU's UUID, or cpu@HOST"),
    Column("attempt", Integer, nullable=False, server_default="1", comment="from 1; 2 with the whole budget"),
    Column("attempts", JSON, comment="earlier attempts: reservation, outcome and evidence of each"),
    Column("waiting_seconds", Double, comment="from its prediction to its launch"),
    Column("outcome", String(32), comment="NULL while it runs"),
    Column("value", Double, comment="best value of the objective's metric"),
    Column("peak_bytes", BigInteger, comment="measured peak device bytes"),
    Column("peak_source", String(64), comment="where peak_bytes comes from"),
    Column("allocated_bytes", BigInteger, comment="measured peak of the allocator's live blocks"),
    Column("reserved_bytes", BigInteger, comment="measured peak of the allocator's segments; CUDA only"),
    Column("baseline_bytes", BigInteger, comment="device bytes after the warm-up"),
    Column("used_before_bytes", BigInteger, comment="used on the device before its launch, by anybody"),
    Column("device_wide_bytes", BigInteger, comment="peak use of the device, other processes included"),
    Column("host_peak_bytes", BigInteger, comment="peak resident bytes of the process on the host"),
    Column("growth_bytes", BigInteger, comment="what each further training step left behind; 0 is the rule"),
    Column("phases", JSON, comment="measured peak device bytes by phase"),
    Column("timeline", JSON, comment="device bytes over time, at most 512 points"),
    Column("metrics", JSON, comment="all metrics of the best epoch"),
    Column("reason", Text, comment="why it did not complete"),
    Column("failure", JSON, comment="evidence: phase, requested, allocated, reserved, free, traceback"),
    Column("seed", BigInteger, comment="seed of the trial"),
    Column("environment", JSON, comment="versions, threads, device"),
    Column("warnings", JSON, comment="what the process noticed"),
    Column("run_folder", Text, comment="where request, events, report and log lie"),
    Column("checkpoint", Text, comment="file in the run folder with the best weights"),
    Column("asked_at", DateTime(timezone=True), nullable=False, comment="UTC"),
    Column("started_at", DateTime(timezone=True), comment="launch, UTC"),
    Column("ended_at", DateTime(timezone=True), comment="UTC"),
    Column("seconds", Double, comment="from launch to end"),
    Column("prediction_seconds", Double, comment="how long the prediction took"),
    Column(
        "driver_id", ForeignKey(driver.c.id, ondelete="SET NULL"), index=True, comment="who drove it last"
    ),
    Column("late_result", JSON, comment="a result that came after the trial had been given up"),
    Column("draws", Integer, comment="configurations drawn before this one was taken, this one included"),
    Column(
        "rehearsal_seconds",
        Double,
        comment="how long it took to find the configuration, predictions included",
    ),
    Column(
        "rejection_id",
        ForeignKey(rejection.c.id, ondelete="SET NULL"),
        index=True,
        comment="the rejection that it audits",
    ),
    UniqueConstraint("study_id", "number"),
    # What a claim looks for: how many are launched, and what is to be run again.
    Index("ix_tuner_trial_study_id_outcome", "study_id", "outcome"),
    Index("ix_tuner_trial_study_id_repeats", "study_id", "repeats"),
)

slot = Table(
    "tuner_slot",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("token", String(36), nullable=False, unique=True, comment="chosen by the driver: a claim repeats"),
    Column("study_id", ForeignKey(study.c.id, ondelete="CASCADE"), nullable=False),
    Column("driver_id", ForeignKey(driver.c.id, ondelete="CASCADE"), nullable=False, index=True),
    Column("trial_id", ForeignKey(trial.c.id, ondelete="CASCADE"), comment="NULL until it was asked for"),
    Column("repeats", Integer, comment="number of the trial whose params are run again, or NULL"),
    Column("audit", Boolean, nullable=False, comment="true: for a configuration that was turned away"),
    Column(
        "rejection_id",
        ForeignKey(rejection.c.id, ondelete="CASCADE"),
        unique=True,
        comment="the rejection that it audits",
    ),
    UniqueConstraint("study_id", "repeats"),
)

reservation = Table(
    "tuner_reservation",
    metadata,
    Column("id", Integer, primary_key=True, comment="who waits longer has the smaller one"),
    Column("driver_id", ForeignKey(driver.c.id, ondelete="CASCADE"), nullable=False, index=True),
    Column("trial_id", ForeignKey(trial.c.id, ondelete="CASCADE"), nullable=False, unique=True),
    Column("device", String(255), nullable=False, index=True, comment="a GPU's UUID, or cpu@HOST"),
    Column("device_bytes", BigInteger, nullable=False, comment="set aside on the device"),
    Column("host", String(255), nullable=False, comment="whose memory the process takes"),
    Column(
        "host_bytes", BigInteger, nullable=False, comment="set aside there; 0 where the device is the host"
    ),
    Column("pid", Integer, comment="the trial's process, once it runs"),
    Column("asked_at", DateTime(timezone=True), nullable=False, comment="UTC, by the database's clock"),
    Column("granted_at", DateTime(timezone=True), comment="NULL while it waits"),
    Column(
        "for_pool", Boolean, nullable=False, comment="true: it waits for its study's pool, not for the device"
    ),
    sqlite_autoincrement=True,
)

metric = Table(
    "tuner_metric",
    metadata,
    Column("trial_id", ForeignKey(trial.c.id, ondelete="CASCADE"), primary_key=True),
    Column("epoch", Integer, primary_key=True, comment="from 1"),
    Column("name", String(255), primary_key=True),
    Column("value", Double, comment="NULL for NaN"),
    Column("seconds", Double, comment="since the start of training"),
    Column("peak_bytes", BigInteger, comment="peak device bytes so far"),
    Column("epoch_peak_bytes", BigInteger, comment="peak device bytes within the epoch"),
    Column("epoch_allocated_bytes", BigInteger, comment="peak of live blocks within the epoch; CUDA only"),
    Column("epoch_reserved_bytes", BigInteger, comment="peak of segments within the epoch; CUDA only"),
)

importance = Table(
    "tuner_importance",
    metadata,
    Column("study_id", ForeignKey(study.c.id, ondelete="CASCADE"), primary_key=True),
    Column("objective", String(16), primary_key=True, comment="value (of the metric) or memory"),
    Column("name", String(255), primary_key=True, comment="the parameter"),
    Column(
        "importance", Double, nullable=False, comment="share of what varies; all of an objective add up to 1"
    ),
    Column("trials", Integer, nullable=False, comment="completed trials that it was computed from"),
    Column("computed_at", DateTime(timezone=True), nullable=False, comment="UTC"),
)
