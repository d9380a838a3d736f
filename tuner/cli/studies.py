"""`tuner studies`: list the studies in the database."""

from __future__ import annotations

import click

from tuner.cli.options import format_option, reading, storage_option


@click.command("studies", short_help="List the studies in the database.")
@storage_option
@format_option
def command(storage: str | None, form: str) -> None:
    """List the studies in the database, newest first."""
    from tuner.cli.output import Column, emit, number, size

    with reading(storage) as reader:
        rows = []
        for study in reader.studies():
            counts = reader.outcomes(study.id)
            front = reader.front(study.id)
            best = [trial.value for trial in front if trial.value is not None]
            pick = max if study.maximize else min
            rows.append(
                {
                    "name": study.name,
                    "workload": study.workload,
                    "target": study.target,
                    "budget_bytes": study.budget_bytes,
                    "trials": sum(counts.values()),
                    "completed": counts.get("completed", 0),
                    "front": len(front),
                    "metric": study.metric,
                    "best": pick(best) if best else None,
                    "running": bool(reader.living_drivers(study.id)),
                    "created_at": study.created_at,
                }
            )
    columns = [
        Column("study", "name"),
        Column("target", "target"),
        size("budget", "budget_bytes"),
        number("trials", "trials", digits=12),
        number("completed", "completed", digits=12),
        number("front", "front", digits=12),
        Column("metric", "metric"),
        number("best", "best"),
    ]
    emit(rows, columns, form, empty="no studies yet; start one with: tuner run studies/digits_cnn.py")
