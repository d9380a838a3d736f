"""What the sampler's filter turned away; audits are of these."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_AUDITED = "the rejection that it audits"
_COMMENTS = {  # of columns, before and after
    ("tuner_trial", "repeats"): (
        sa.Integer(),
        "number of the trial whose params this one runs again (interrupted, or audited)",
        "number of the interrupted trial whose params this one runs again",
    ),
    ("tuner_slot", "audit"): (
        sa.Boolean(),
        "true: the repeated trial was predicted not to fit",
        "true: for a configuration that was turned away",
    ),
}


def _found() -> list[sa.Column[Any]]:
    return [
        sa.Column(
            "draws",
            sa.Integer(),
            comment="configurations drawn before this one was taken, this one included",
        ),
        sa.Column(
            "rehearsal_seconds",
            sa.Double(),
            comment="how long it took to find the configuration, predictions included",
        ),
    ]


def _say(*, newer: bool) -> None:
    """Change comments, where the database keeps them."""
    if op.get_bind().dialect.name == "sqlite":
        return
    for (table, column), (kind, before, after) in _COMMENTS.items():
        then, now = (before, after) if newer else (after, before)
        op.alter_column(table, column, existing_type=kind, comment=now, existing_comment=then)


def upgrade() -> None:
    """Rejections are rows of their own; a trial that was pruned is one of them."""
    op.create_table(
        "tuner_rejection",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False, comment="the trial that it was drawn for"),
        sa.Column("place", sa.Integer(), nullable=False, comment="from 0, in the order of the draws"),
        sa.Column("params", sa.JSON(), nullable=False, comment="the configuration"),
        sa.Column("answers", sa.JSON(), comment="what suggest() was answered, where params say otherwise"),
        sa.Column("predicted_bytes", sa.BigInteger(), comment="predicted device bytes, expected"),
        sa.Column("reason", sa.Text(), nullable=False, comment="why it was turned away"),
        sa.ForeignKeyConstraint(
            ["study_id"],
            ["tuner_study.id"],
            name=op.f("fk_tuner_rejection_study_id_tuner_study"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tuner_rejection")),
        sa.UniqueConstraint(
            "study_id", "number", "place", name=op.f("uq_tuner_rejection_study_id_number_place")
        ),
    )
    with op.batch_alter_table("tuner_trial") as table:
        for column in _found():
            table.add_column(column)
        table.add_column(sa.Column("rejection_id", sa.Integer(), comment=_AUDITED))
        table.create_foreign_key(
            op.f("fk_tuner_trial_rejection_id_tuner_rejection"),
            "tuner_rejection",
            ["rejection_id"],
            ["id"],
            ondelete="SET NULL",
        )
        table.create_index(op.f("ix_tuner_trial_rejection_id"), ["rejection_id"])
    op.execute("DELETE FROM tuner_slot WHERE audit")  # of drivers that are gone: none lives during an upgrade
    with op.batch_alter_table("tuner_slot") as table:
        table.add_column(sa.Column("rejection_id", sa.Integer(), comment=_AUDITED))
        table.create_foreign_key(
            op.f("fk_tuner_slot_rejection_id_tuner_rejection"),
            "tuner_rejection",
            ["rejection_id"],
            ["id"],
            ondelete="CASCADE",
        )
        table.create_unique_constraint(op.f("uq_tuner_slot_rejection_id"), ["rejection_id"])
    op.execute(
        "INSERT INTO tuner_rejection (study_id, number, place, params, predicted_bytes, reason) "
        "SELECT study_id, number, 0, params, predicted_bytes, coalesce(reason, 'predicted not to fit') "
        "FROM tuner_trial WHERE outcome = 'pruned_memory'"
    )
    op.execute(
        "UPDATE tuner_trial SET rejection_id = (SELECT r.id FROM tuner_rejection r "
        "WHERE r.study_id = tuner_trial.study_id AND r.number = tuner_trial.repeats) WHERE audit"
    )
    op.execute("UPDATE tuner_trial SET repeats = NULL WHERE audit")
    _say(newer=True)


def downgrade() -> None:
    """What was turned away is forgotten, but for trials that were pruned."""
    _say(newer=False)
    op.execute(
        "UPDATE tuner_trial SET repeats = (SELECT r.number FROM tuner_rejection r "
        "WHERE r.id = tuner_trial.rejection_id) WHERE audit"
    )
    op.execute("DELETE FROM tuner_slot WHERE audit")
    with op.batch_alter_table("tuner_slot") as table:
        table.drop_constraint(op.f("uq_tuner_slot_rejection_id"), type_="unique")
        table.drop_constraint(op.f("fk_tuner_slot_rejection_id_tuner_rejection"), type_="foreignkey")
        table.drop_column("rejection_id")
    with op.batch_alter_table("tuner_trial") as table:
        table.drop_index(op.f("ix_tuner_trial_rejection_id"))
        table.drop_constraint(op.f("fk_tuner_trial_rejection_id_tuner_rejection"), type_="foreignkey")
        for name in ("rejection_id", *(column.name for column in _found())):
            table.drop_column(name)
    op.drop_table("tuner_rejection")
