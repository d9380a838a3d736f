"""The front as a picture for papers and messages, drawn with Matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tuner.errors import UsageError
from tuner.store.overview import Table
from tuner.store.rows import StudyRecord, TrialRecord
from tuner.units import GIB, MIB

_FORMS = ("svg", "png", "pdf")
# Colours that people with colour-blindness tell apart (Okabe and Ito, 2008).
_BLUE, _ORANGE, _GREEN = "#0072B2", "#D55E00", "#009E73"
_SECOND_UNIT_FROM = 4 * GIB  # from which memory is shown in GiB
_MOST_AS_PATHS = 5_000  # points in an SVG or PDF; more are one embedded picture


def check_path(path: Path) -> None:
    """Check that a picture can be written there.

    Raises:
        UsageError: The suffix is unknown, or the folder is not there.
    """
    if path.suffix.removeprefix(".").lower() not in _FORMS:
        raise UsageError(
            f"no picture can be written as '{path.name}'", hint=f"names end in .{', .'.join(_FORMS)}"
        )
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {path.absolute().parent}")


def draw_front(
    study: StudyRecord, points: Table, front: Sequence[TrialRecord], budget_bytes: int, path: Path
) -> None:
    """Write the picture.

    Args:
        study: The study.
        points: Its trials, as `Overview.points` returns them.
        front: The trials on its front under the budget, smallest first.
        budget_bytes: Drawn as a line.
        path: Where to; the suffix decides how.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    columns = points.columns
    rows = [
        (memory, value)
        for outcome, memory, value in zip(
            columns["outcome"], columns["memory_bytes"], columns["value"], strict=True
        )
        if outcome == "completed" and memory is not None and value is not None and abs(value) < float("inf")
    ]
    largest = max([budget_bytes, *(memory for memory, _ in rows)])
    scale, unit = (GIB, "GiB") if largest >= _SECOND_UNIT_FROM else (MIB, "MiB")
    with mpl.rc_context({"svg.hashsalt": "tuner", "svg.fonttype": "none"}):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.add_subplot()
        for label, color, marker, chosen in (
            ("fits the budget", _BLUE, "o", [row for row in rows if row[0] <= budget_bytes]),
            ("over the budget", _ORANGE, "x", [row for row in rows if row[0] > budget_bytes]),
        ):
            if chosen:
                axes.scatter(
                    [memory / scale for memory, _ in chosen],
                    [value for _, value in chosen],
                    s=14,
                    alpha=0.6,
                    color=color,
                    marker=marker,
                    label=label,
                    linewidths=0.8,
                    rasterized=len(rows) > _MOST_AS_PATHS,
                )
        corners = [((trial.peak_bytes or 0) / scale, trial.value or 0.0) for trial in front]
        if corners:
            axes.step(
                [memory for memory, _ in corners] + [budget_bytes / scale],
                [value for _, value in corners] + [corners[-1][1]],  # the best one, up to the budget
                where="post",
                color=_GREEN,
                label="front",
            )
            axes.plot(*zip(*corners, strict=True), "o", color=_GREEN, fillstyle="none", markersize=7)
        axes.axvline(budget_bytes / scale, color=_ORANGE, linestyle="--", linewidth=1, label="budget")
        axes.set_xlabel(f"peak device memory ({unit})")
        axes.set_ylabel(_escaped(study.metric))
        axes.set_title(_escaped(study.name), fontsize="medium")
        axes.grid(alpha=0.25)
        axes.legend(fontsize="small")
        figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)


def _escaped(text: str) -> str:
    """Return a user's text such that Matplotlib takes no $ in it for mathematics."""
    return text.replace("$", r"\$")
