"""`tuner importance`: how much each parameter matters."""

from __future__ import annotations

import click

from tuner.cli.options import format_option, storage_option, storage_url


@click.command("importance", short_help="Show how much each parameter matters.")
@click.argument("name")
@storage_option
@format_option
def command(name: str, storage: str | None, form: str) -> None:
    """Compute how much each parameter of study NAME matters, for the metric and for peak memory.

    Shares of what varies among the completed trials (fANOVA), which add up to 1. They are stored in
    tuner_importance, where the app's page Search finds them. A parameter that only some trials have
    is left out.
    """
    from tuner.cli.output import Column, emit
    from tuner.search.importance import importances
    from tuner.store.opening import reading, writing

    url = storage_url(storage)
    with reading(url) as reader:
        study = reader.study(name)
        trials = reader.trials(study.id, ["completed"])
    found, count = importances(url, study, trials)
    with writing(url) as (_, writer, _):
        writer.record_importance(study.id, found, count)
    names = list(dict.fromkeys(name for shares in found.values() for name in shares))
    rows = [{"param": name, **{key: shares.get(name) for key, shares in found.items()}} for name in names]
    columns = [
        Column("parameter", "param"),
        Column(study.metric, "value", _percent, right=True),
        Column("peak memory", "memory", _percent, right=True),
    ]
    emit(rows, columns, form, empty="no parameter varies among the completed trials")
    if form == "table":
        click.echo(f"share of what varies among {count} completed trials")


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
