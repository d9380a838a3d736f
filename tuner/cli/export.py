"""`tuner export`: a study's trials as a file."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tuner.cli.options import reading, storage_option
from tuner.errors import UsageError

_FORMS = ("csv", "json", "parquet")


@click.command("export", short_help="Write a study's trials to a CSV, JSON or Parquet file.")
@click.argument("name")
@click.option("-o", "--output", metavar="FILE", required=True, help="Where to; - is standard output.")
@click.option(
    "-f",
    "--format",
    "form",
    type=click.Choice(_FORMS),
    help="How  [default: as the file's name ends, else csv]",
)
@storage_option
def command(name: str, output: str, form: str | None, storage: str | None) -> None:
    """Write the trials of study NAME to a file, one row each.

    Params and metrics are columns of their own, param.NAME and metric.NAME, with one type each:
    numbers stay numbers, and a param that is a number in some trials and text in others is text.
    """
    from tuner.store.exports import rows_of, write

    form = form or _form_of(output)
    with reading(storage) as reader:
        study = reader.study(name)
        rows = rows_of(study, reader.trials(study.id))
    if output == "-":
        write(rows, sys.stdout.buffer, form)
        return
    path = Path(output)
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {path.absolute().parent}")
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with aside.open("wb") as file:
            write(rows, file, form)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    click.echo(f"{len(rows)} trials written to {path}", err=True)


def _form_of(output: str) -> str:
    suffix = Path(output).suffix.removeprefix(".").lower()
    if output == "-" or not suffix:
        return "csv"
    if suffix not in _FORMS:
        raise UsageError(
            f"a file that ends in '.{suffix}' cannot be written", hint=f"formats: {', '.join(_FORMS)}"
        )
    return suffix
