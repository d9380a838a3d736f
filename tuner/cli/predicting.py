"""What the commands that predict share: their options, and a workload ready to be predicted."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tuner.errors import UsageError
from tuner.settings import resolve
from tuner.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from tuner.memory.predictor import Predictor
    from tuner.memory.targets import Target
    from tuner.records import Band, Prediction
    from tuner.workload import LoadedWorkload

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--set", "assignments", metavar="NAME=VALUE", multiple=True, help="A parameter; repeat for more."
    ),
    click.option(
        "--target",
        metavar="NAME",
        help="cpu, cuda or a profile such as a100-40gb  [default: cuda if there is one, else cpu]",
    ),
    click.option(
        "--budget",
        metavar="SIZE",
        help="Judge against this, such as 6GiB  [default: the workload's own, or the whole GPU]",
    ),
    click.option("--threads", metavar="N", help="Intra-op threads of the trial  [default: all cores]"),
)


def prediction_options(function: Decorated) -> Decorated:
    """Add `--set`, `--target`, `--budget` and `--threads`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


class Setup:
    """A workload, a target and a budget; predicts configurations when called.

    Attributes:
        loaded: The workload.
        target: The device predicted for.
        budget_bytes: What predictions are judged against, or None.
        predictor: Traces.
    """

    def __init__(
        self, loaded: LoadedWorkload, target: Target, budget_bytes: int | None, predictor: Predictor
    ) -> None:
        self.loaded, self.target, self.budget_bytes = loaded, target, budget_bytes
        self.predictor = predictor
        self._context_bytes: int | None = None

    def __call__(self, params: dict[str, Any]) -> Prediction:
        """Predict one configuration; a CPU's context is measured once, before the first trace."""
        from tuner.memory.calibration import Calibration
        from tuner.memory.prediction import predict

        if self.target.kind == "cpu" and self._context_bytes is None:
            self._context_bytes = self.predictor.context_bytes(params)
        found = self.predictor.estimate(params, exact=True)
        return predict(
            found,
            self.target,
            Calibration.of_mix(self.target.kind, found.mix),
            context_bytes=self._context_bytes,
            budget_bytes=self.budget_bytes,
        )


@contextmanager
def predicting(study: str, flags: dict[str, Any]) -> Iterator[Setup]:
    """Load a study file and start its predictor, as `--target`, `--budget` and `--threads` say.

    Raises:
        UsageError: A flag or the study file cannot be used as given.
    """
    from tuner.execution.launcher import visible_threads
    from tuner.memory.predictor import Predictor, PredictorError
    from tuner.scheduling.devices import choose_places, present_target
    from tuner.stand_in import check_memory_free
    from tuner.workload import load_workload

    value = {name: s.value for name, s in resolve(flags, ["target", "budget", "threads"]).items()}
    target = present_target(value["target"] or choose_places(None)[0].target)
    loaded = load_workload(study)
    check_memory_free(loaded.workload)
    budget_bytes = value["budget"] or _default_budget(loaded, target)
    with tempfile.TemporaryDirectory() as folder:
        predictor = Predictor(
            loaded.reference,
            target.profile,
            log=Path(folder) / "log.txt",
            threads=value["threads"] or visible_threads(),
        )
        predictor.on_warning = lambda message: click.echo(f"warning: {message}", err=True)
        try:
            yield Setup(loaded, target, budget_bytes, predictor)
        except PredictorError as error:
            raise PredictorError(error.message) from error  # the log goes with its folder
        finally:
            predictor.close()


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Give a function that shows what is being done, on standard error when that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda message: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True, highlight=False).status("starting") as status:
        yield lambda message: status.update(Text(message))


def values_of(assignments: tuple[str, ...]) -> dict[str, str]:
    """Return `--set NAME=VALUE` as a dictionary.

    Raises:
        UsageError: One is no assignment.
    """
    values = {}
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator or not name:
            raise UsageError(f"--set takes NAME=VALUE, not '{assignment}'")
        values[name.strip()] = text.strip()
    return values


def band_text(band: Band | None) -> str:
    """Return a band on one line."""
    if band is None:
        return "unknown"
    return f"{format_bytes(band.expected)}  ({format_bytes(band.low)} to {format_bytes(band.high)})"


def print_pairs(rows: list[tuple[str, str]]) -> None:
    """Print titles and texts below each other, within 80 columns."""
    for title, text in rows:
        click.echo(
            click.wrap_text(text, 80, f"{title:<14} ", " " * 15) if len(text) > 65 else f"{title:<14} {text}"
        )


def _default_budget(loaded: LoadedWorkload, target: Target) -> int | None:
    """Return the workload's own budget, as `tuner run` takes it, else the whole GPU."""
    default = loaded.workload.default_budget
    if default:
        return parse_bytes(default)
    return target.capacity_bytes if target.kind == "cuda" else None
