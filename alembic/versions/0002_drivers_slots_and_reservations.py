"""Several drivers per study, slots, reservations, and what trials are measured by."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_OWNER = ("owner_host", "owner_boot_id", "owner_pid", "owner_started")
_CLAIMED_BY = ("outcome", "repeats")  # what a claim looks for within a study
_SIZES = {
    "tuner_trial": {
        "used_before_bytes": "used on the device before its launch, by anybody",
        "device_wide_bytes": "peak use of the device, other processes included",
        "host_peak_bytes": "peak resident bytes of the process on the host",
        "growth_bytes": "what each further training step left behind; 0 is the rule",
    },
    "tuner_metric": {
        "epoch_peak_bytes": "peak device bytes within the epoch",
        "epoch_allocated_bytes": "peak of live blocks within the epoch; CUDA only",
        "epoch_reserved_bytes": "peak of segments within the epoch; CUDA only",
    },
}


def _sizes(table: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.BigInteger(), comment=comment) for name, comment in _SIZES[table].items()]


def _trial_columns() -> list[sa.Column[Any]]:
    attempts = "earlier attempts: reservation, outcome and evidence of each"
    return [
        sa.Column("device", sa.String(255), comment="the device it ran on: a GPU's UUID, or cpu@HOST"),
        sa.Column(
            "attempt",
            sa.Integer(),
            nullable=False,
            server_default="1",
            comment="from 1; 2 with the whole budget",
        ),
        sa.Column("attempts", sa.JSON(), comment=attempts),
        sa.Column("waiting_seconds", sa.Double(), comment="from its prediction to its launch"),
        *_sizes("tuner_trial"),
        sa.Column("timeline", sa.JSON(), comment="device bytes over time, at most 512 points"),
        sa.Column("driver_id", sa.Integer(), comment="who drove it last"),
        sa.Column("late_result", sa.JSON(), comment="a result that came after the trial had been given up"),
    ]


def upgrade() -> None:
    """Studies and trials lose their owner's columns: a driver is a row of its own now."""
    _create_driver()
    with op.batch_alter_table("tuner_study") as table:
        for name in (*_OWNER, "owner_seen_at", "stop_reason"):
            table.drop_column(name)
    with op.batch_alter_table("tuner_trial") as table:
        for name in _OWNER:
            table.drop_column(name)
        for column in _trial_columns():
            table.add_column(column)
        table.create_foreign_key(
            op.f("fk_tuner_trial_driver_id_tuner_driver"),
            "tuner_driver",
            ["driver_id"],
            ["id"],
            ondelete="SET NULL",
        )
        table.create_index(op.f("ix_tuner_trial_driver_id"), ["driver_id"])
        for column in _CLAIMED_BY:
            table.create_index(op.f(f"ix_tuner_trial_study_id_{column}"), ["study_id", column])
    with op.batch_alter_table("tuner_metric") as table:
        for column in _sizes("tuner_metric"):
            table.add_column(column)
    _create_slot()
    _create_reservation()


def _create_driver() -> None:
    op.create_table(
        "tuner_driver",
        sa.Column(
            "id",
            sa.Integer(),
            nullable=False,
            comment="also the fencing token of what it holds: ids only grow",
        ),
        sa.Column("token", sa.String(36), nullable=False, comment="chosen when it joins: a join repeats"),
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("host", sa.String(255), nullable=False, comment="where it runs"),
        sa.Column(
            "boot_id",
            sa.String(64),
            nullable=False,
            comment="boot of that host: a pid is unique within one",
        ),
        sa.Column("pid", sa.Integer(), nullable=False, comment="its process"),
        sa.Column(
            "started",
            sa.String(32),
            nullable=False,
            comment="start of that process, in clock ticks since boot",
        ),
        sa.Column(
            "joined_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="UTC, by the database's clock",
        ),
        sa.Column(
            "seen_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="last sign of life, by the same clock",
        ),
        sa.Column(
            "back_at",
            sa.DateTime(timezone=True),
            comment="when its signs of life came again after a gap, or NULL",
        ),
        sa.Column(
            "ended_at",
            sa.DateTime(timezone=True),
            comment="when it left, or was given up; NULL while it works",
        ),
        sa.Column("end_reason", sa.Text(), comment="why it ended; 'lost' where others gave it up"),
        sa.Column("stop_reason", sa.Text(), comment="set by `tuner stop`: it ends after its running trials"),
        sa.Column(
            "environment",
            sa.JSON(),
            comment="command line, settings with origins, git commit, versions, GPU driver",
        ),
        sa.ForeignKeyConstraint(
            ["study_id"],
            ["tuner_study.id"],
            name=op.f("fk_tuner_driver_study_id_tuner_study"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tuner_driver")),
        sa.UniqueConstraint("token", name=op.f("uq_tuner_driver_token")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_tuner_driver_study_id"), "tuner_driver", ["study_id"])


def _create_slot() -> None:
    op.create_table(
        "tuner_slot",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("token", sa.String(36), nullable=False, comment="chosen by the driver: a claim repeats"),
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("driver_id", sa.Integer(), nullable=False),
        sa.Column("trial_id", sa.Integer(), comment="NULL until it was asked for"),
        sa.Column("repeats", sa.Integer(), comment="number of the trial whose params are run again, or NULL"),
        sa.Column(
            "audit",
            sa.Boolean(),
            nullable=False,
            comment="true: the repeated trial was predicted not to fit",
        ),
        _cascade("tuner_slot", "study_id", "tuner_study"),
        _cascade("tuner_slot", "driver_id", "tuner_driver"),
        _cascade("tuner_slot", "trial_id", "tuner_trial"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tuner_slot")),
        sa.UniqueConstraint("token", name=op.f("uq_tuner_slot_token")),
        sa.UniqueConstraint("study_id", "repeats", name=op.f("uq_tuner_slot_study_id_repeats")),
    )
    op.create_index(op.f("ix_tuner_slot_driver_id"), "tuner_slot", ["driver_id"])


def _create_reservation() -> None:
    op.create_table(
        "tuner_reservation",
        sa.Column("id", sa.Integer(), nullable=False, comment="who waits longer has the smaller one"),
        sa.Column("driver_id", sa.Integer(), nullable=False),
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("device", sa.String(255), nullable=False, comment="a GPU's UUID, or cpu@HOST"),
        sa.Column("device_bytes", sa.BigInteger(), nullable=False, comment="set aside on the device"),
        sa.Column("host", sa.String(255), nullable=False, comment="whose memory the process takes"),
        sa.Column(
            "host_bytes",
            sa.BigInteger(),
            nullable=False,
            comment="set aside there; 0 where the device is the host",
        ),
        sa.Column("pid", sa.Integer(), comment="the trial's process, once it runs"),
        sa.Column(
            "asked_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="UTC, by the database's clock",
        ),
        sa.Column("granted_at", sa.DateTime(timezone=True), comment="NULL while it waits"),
        sa.Column(
            "for_pool",
            sa.Boolean(),
            nullable=False,
            comment="true: it waits for its study's pool, not for the device",
        ),
        _cascade("tuner_reservation", "driver_id", "tuner_driver"),
        _cascade("tuner_reservation", "trial_id", "tuner_trial"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tuner_reservation")),
        sa.UniqueConstraint("trial_id", name=op.f("uq_tuner_reservation_trial_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_tuner_reservation_driver_id"), "tuner_reservation", ["driver_id"])
    op.create_index(op.f("ix_tuner_reservation_device"), "tuner_reservation", ["device"])


def _cascade(table: str, column: str, referred: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        [column], [f"{referred}.id"], name=op.f(f"fk_{table}_{column}_{referred}"), ondelete="CASCADE"
    )


def downgrade() -> None:
    """Who drives, holds and waits is forgotten; so are the new measurements."""
    op.drop_table("tuner_reservation")
    op.drop_table("tuner_slot")
    with op.batch_alter_table("tuner_metric") as table:
        for column in _sizes("tuner_metric"):
            table.drop_column(column.name)
    with op.batch_alter_table("tuner_trial") as table:
        for column in ("driver_id", *(f"study_id_{column}" for column in _CLAIMED_BY)):
            table.drop_index(op.f(f"ix_tuner_trial_{column}"))
        table.drop_constraint(op.f("fk_tuner_trial_driver_id_tuner_driver"), type_="foreignkey")
        for column in _trial_columns():
            table.drop_column(column.name)
        for column in _owner_columns():
            table.add_column(column)
    with op.batch_alter_table("tuner_study") as table:
        for column in _owner_columns():
            table.add_column(column)
        table.add_column(sa.Column("owner_seen_at", sa.DateTime(timezone=True)))
        table.add_column(sa.Column("stop_reason", sa.Text()))
    op.drop_table("tuner_driver")


def _owner_columns() -> tuple[sa.Column[Any], ...]:
    return (
        sa.Column("owner_host", sa.String(255)),
        sa.Column("owner_boot_id", sa.String(64)),
        sa.Column("owner_pid", sa.Integer()),
        sa.Column("owner_started", sa.String(32)),
    )
