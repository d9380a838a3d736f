"""`tuner largest`: the largest value of one parameter that fits the budget."""

from __future__ import annotations

from typing import Any

import click

from tuner.cli.finder import Answer, Finder
from tuner.cli.options import format_option
from tuner.cli.predicting import Setup, band_text, predicting, prediction_options, print_pairs, progress
from tuner.cli.predicting import values_of as values_from
from tuner.errors import NothingFeasible, Untraceable, UsageError
from tuner.units import format_bytes, format_seconds


@click.command("largest", short_help="Find the largest value of a parameter that fits the budget.")
@click.argument("study", metavar="STUDY")
@click.option(
    "--param", metavar="NAME", required=True, help="A whole number or ordered choice of the search space."
)
@click.option("--over", metavar="NAME", help="Repeat for the values of this parameter, as a table.")
@click.option("--max", "maximum", metavar="N", type=int, help="Look up to N, even beyond the search space.")
@prediction_options
@format_option
def command(
    study: str,
    param: str,
    over: str | None,
    maximum: int | None,
    assignments: tuple[str, ...],
    form: str,
    **flags: Any,
) -> None:
    """Find the largest value of one parameter of STUDY that surely fits the budget.

    Values are predicted, not run, by bisection. Where a larger value is seen to need less than a
    smaller one, more values are predicted, and the answer says how sure it is. Parameters that are
    not set take the middle of their range, or their first choice.

    \b
    Examples:
      tuner largest studies/digits_cnn.py --param batch_size --set width=96
      tuner largest studies/char_gpt.py --param batch_size --over width --max 4096 --target rtx-3090
    """
    values = values_from(assignments)
    for name in (param, over):
        if name in values:
            raise UsageError(f"--set {name}={values[name]}: {name} is what varies here")
    if param == over:
        raise UsageError(f"--over {over} is the parameter that is looked for")
    with predicting(study, flags) as setup, progress() as show:
        finder = Finder(setup, param, values, maximum, show)
        answers = [finder.find({over: value}) for value in finder.values_over(over)] if over else []
        answer = None if over else finder.find({})
    if over:
        _report_table(answers, param, over, setup, form)
    else:
        assert answer is not None
        _report(answer, param, setup, form)


def _check_feasible(answers: list[Answer], param: str, budget_bytes: int) -> None:
    """Raise when there is no answer at all.

    Raises:
        NothingFeasible: No value may fit.
        Untraceable: No value could be predicted.
    """
    if any(answer.capacity.largest or answer.capacity.largest_to_try for answer in answers):
        return
    smallest = [answer.capacity.smallest for answer in answers]
    required = [p.prediction.required for p in smallest if p is not None and p.prediction.required]
    if not required:
        reason = answers[0].capacity.untraceable[0].prediction.assumptions[0]
        raise Untraceable(f"no {param} can be predicted: {reason}", hint="try one under a cap: tuner run")
    least = min(band.expected for band in required)
    raise NothingFeasible(
        f"no {param} fits the budget of {format_bytes(budget_bytes)}; "
        f"the smallest prediction is {format_bytes(least)}",
        hint=f"raise --budget, or --set the other parameters smaller: {_shown(answers[0].params)}",
    )


def _shown(params: dict[str, Any]) -> str:
    from tuner.cli.output import short_params

    return short_params(params)


def _report(answer: Answer, param: str, setup: Setup, form: str) -> None:
    from tuner.cli.output import emit_one

    assert setup.budget_bytes is not None
    _check_feasible([answer], param, setup.budget_bytes)
    fields = answer.to_json()
    if form != "table":
        emit_one({**_head(param, setup), **fields, "left_bytes": _left(answer, setup.budget_bytes)}, form)
        return
    largest, to_try = fields["largest"], fields["largest_to_try"]
    rows = [(f"largest {param}", "none surely fits" if largest is None else str(largest))]
    if to_try != largest:
        rows.append(("may fit, up to", str(to_try)))
    shown = answer.capacity.shown
    assert shown is not None
    rows += [
        ("configuration", _shown(answer.params)),
        ("target", setup.target.name),
        ("budget", format_bytes(setup.budget_bytes)),
        ("required", band_text(shown.prediction.required)),
        ("device", band_text(shown.prediction.device)),
        ("left", format_bytes(_left(answer, setup.budget_bytes))),
        ("predicted", _how(answer)),
        ("took", format_seconds(answer.seconds)),
    ]
    width = max(len(title) for title, _ in rows)
    print_pairs([(title.ljust(width), text) for title, text in rows])
    for note in answer.notes:
        click.echo(f"note: {note}")


def _how(answer: Answer) -> str:
    """Return what the answer rests on, on one line."""
    found = answer.capacity
    sure = "; none speaks against the answer" if found.certainty == "bisection" else ""
    return f"{len(found.probes)} of {found.values} values{sure}"


def _report_table(answers: list[Answer], param: str, over: str, setup: Setup, form: str) -> None:
    from tuner.cli.output import Column, emit, emit_one, size

    assert setup.budget_bytes is not None
    _check_feasible(answers, param, setup.budget_bytes)
    rows = [
        {over: answer.fixed[over], **answer.to_json(), "left_bytes": _left(answer, setup.budget_bytes)}
        for answer in answers
    ]
    if form == "json":
        emit_one({**_head(param, setup), "over": over, "rows": rows}, form)
        return
    flat = [
        {
            **{key: row[key] for key in (over, "largest", "largest_to_try", "left_bytes", "certainty")},
            "required_bytes": _expected(row["required_bytes"]),
            "device_bytes": _expected(row["device_bytes"]),
        }
        for row in rows
    ]
    columns = [
        Column(over, over, right=True),
        Column(f"largest {param}", "largest", right=True),
        Column("may fit", "largest_to_try", right=True),
        size("required", "required_bytes"),
        size("device", "device_bytes"),
        size("left", "left_bytes"),
    ]
    if form == "table":
        click.echo(f"{param} on {setup.target.name}, budget {format_bytes(setup.budget_bytes)}\n")
    emit(flat, columns, form, empty="nothing fits")
    if form == "table":
        for note in dict.fromkeys(note for answer in answers for note in answer.notes):
            click.echo(f"note: {note}")


def _head(param: str, setup: Setup) -> dict[str, Any]:
    return {"param": param, "target": setup.target.name, "budget_bytes": setup.budget_bytes}


def _expected(band: dict[str, int] | None) -> int | None:
    return None if band is None else band["expected"]


def _left(answer: Answer, budget_bytes: int) -> int | None:
    """Return what the shown configuration leaves of the budget; negative where it does not fit."""
    shown = answer.capacity.shown
    required = None if shown is None else shown.prediction.required
    return None if required is None else budget_bytes - required.expected
