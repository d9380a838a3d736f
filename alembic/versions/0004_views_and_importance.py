"""Importance of parameters as rows; the mix of operators as a column; more views."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """The mix of trials that were predicted before is taken from their predictions."""
    op.add_column(
        "tuner_trial",
        sa.Column(
            "mix",
            sa.String(32),
            comment="the mix of operators: trials of the same mix calibrate one another",
        ),
    )
    on_sqlite = op.get_bind().dialect.name == "sqlite"
    mix = "json_extract(prediction, '$.mix')" if on_sqlite else "prediction ->> 'mix'"
    op.execute(f"UPDATE tuner_trial SET mix = {mix} WHERE predicted_bytes IS NOT NULL")  # noqa: S608
    op.create_table(
        "tuner_importance",
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("objective", sa.String(16), nullable=False, comment="value (of the metric) or memory"),
        sa.Column("name", sa.String(255), nullable=False, comment="the parameter"),
        sa.Column(
            "importance",
            sa.Double(),
            nullable=False,
            comment="share of what varies; all of an objective add up to 1",
        ),
        sa.Column(
            "trials", sa.Integer(), nullable=False, comment="completed trials that it was computed from"
        ),
        sa.Column("computed_at", sa.DateTime(timezone=True), nullable=False, comment="UTC"),
        sa.ForeignKeyConstraint(
            ["study_id"],
            ["tuner_study.id"],
            name=op.f("fk_tuner_importance_study_id_tuner_study"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("study_id", "objective", "name", name=op.f("pk_tuner_importance")),
    )


def downgrade() -> None:
    """Importances can be computed again."""
    op.drop_table("tuner_importance")
    with op.batch_alter_table("tuner_trial") as table:
        table.drop_column("mix")
