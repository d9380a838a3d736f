"""Every error that this package raises on purpose.

    TunerError
    ├── UsageError              bad input: a flag, a size, a study file        exit 2
    │   └── WorkloadError       a study file that cannot be loaded             exit 2
    ├── NothingFeasible         no configuration fits the budget               exit 3
    ├── TooManyFailures         the study stopped itself                       exit 4
    ├── StoreError              the database cannot be used                    exit 5
    │   ├── SchemaError         its schema is newer, older or foreign          exit 5
    │   ├── StudyBusy           a live driver works on the study               exit 5
    │   └── LeaseLost           others gave this driver up for lost; caught by the loop
    ├── Interrupted             Ctrl-C or SIGTERM; the study can be resumed    exit 130
    └── Untraceable             a step that cannot be run on fake tensors; caught by the
                                predictor, which then says so instead of predicting

What becomes of one trial is never an exception: it is an `Outcome` (records.py).
"""

from __future__ import annotations

from typing import ClassVar


class TunerError(Exception):
    """The root of the tree: one line for the user, and what to do about it.

    Args:
        message: What is wrong, in one line.
        hint: What the user can do, in one line, or None.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.hint)


def _rebuild(kind: type[TunerError], message: str, hint: str | None) -> TunerError:
    return kind(message, hint=hint)


class UsageError(TunerError):
    """The command, a flag or a value cannot be used as given."""

    exit_code = 2


class WorkloadError(UsageError):
    """A study file cannot be loaded, or its workload breaks the contract."""


class NothingFeasible(TunerError):
    """No configuration that was seen fits the budget."""

    exit_code = 3


class TooManyFailures(TunerError):
    """More launches failed than the study tolerates."""

    exit_code = 4


class StoreError(TunerError):
    """The database cannot be reached, read or written."""

    exit_code = 5


class SchemaError(StoreError):
    """The database holds another schema than this version works with."""


class StudyBusy(StoreError):
    """A driver that is alive works on the study."""


class LeaseLost(StoreError):
    """This driver, or its trial, was given up for lost: what it holds is others' now."""


class Interrupted(TunerError):
    """The user stopped the study; everything finished is recorded."""

    exit_code = 130


class Untraceable(TunerError):
    """A step cannot be followed on fake tensors; the message is the reason."""
