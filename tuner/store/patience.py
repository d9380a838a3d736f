"""Waiting out a database that is away for a moment: a lock held by others, a server that restarts.

Only failures that pass by themselves are repeated. A call that is repeated may have been carried
out already (its COMMIT arrived, the answer did not), so that it must be one that may be repeated.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import psycopg
from sqlalchemy.exc import DBAPIError
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from tuner.errors import SchemaError, StoreError, TunerError

Result = TypeVar("Result")

_SHORTEST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.05, 5.0
_LOOK_SECONDS = 0.1  # how often a wait looks whether to give up
_SILENT_SECONDS = 1.0  # a conflict that the first repetition mends is not worth a word

# The low byte of SQLite's extended codes: BUSY, LOCKED, and PROTOCOL (others recover the WAL).
_SQLITE_TRANSIENT = frozenset({5, 6, 15})
# https://www.postgresql.org/docs/current/errcodes-appendix.html
_SQLSTATES = {
    "57P01": "it is shutting down",
    "57P02": "it crashed",
    "57P03": "it is starting up",
    "53300": "it has too many connections",
    "40001": "a conflict with another transaction",
    "40P01": "a deadlock with another transaction",
    "55P03": "locked by another program",
}
# libpq gives no SQLSTATE when connecting fails. What is not listed (a wrong password, a missing
# database, a misspelt option) does not pass by itself.
_CONNECTING = {
    "starting up": "it is starting up",
    "in recovery": "it is starting up",
    "not yet accepting connections": "it is starting up",
    "shutting down": "it is shutting down",
    "administrator command": "it is shutting down",
    "too many clients": "it has too many connections",
    "connection slots are reserved": "it has too many connections",
    "Connection refused": "connection refused",
    "failed: No such file or directory": "its socket is not there",
    "server closed the connection": "it closed the connection",
    "Connection reset by peer": "it closed the connection",
    "Broken pipe": "it closed the connection",
    "SSL SYSCALL error": "it closed the connection",
    "SSL connection has been closed": "it closed the connection",
    "timeout expired": "no answer",
    "timed out": "no answer",
    "No route to host": "its host cannot be reached",
    "Network is unreachable": "its host cannot be reached",
    "failed to resolve host": "its host's name cannot be resolved",
    "could not translate host name": "its host's name cannot be resolved",
}


def patient(
    call: Callable[[], Result],
    *,
    on_wait: Callable[[str], None],
    should_give_up: Callable[[], bool],
    seconds: float = 600.0,
) -> Result:
    """Return what a call returns; repeat it for as long as the database is away.

    The first use of a database must not wait: a misspelt host would look like an outage. Open it
    plainly, and wrap what follows.

    Args:
        call: Does one thing, whole or not at all, that may be done twice without harm.
        on_wait: Told once that the database is away, and once that it is back; no password in it.
        should_give_up: Looked at ten times a second; True ends the waiting.
        seconds: The longest outage to wait out.

    Raises:
        BaseException: What the call raised last, when waiting ended or cannot help.
    """
    outage = _Outage(on_wait, should_give_up)
    retrying = Retrying(
        retry=retry_if_exception(lambda error: why_transient(error) is not None),
        wait=wait_random_exponential(
            _SHORTEST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS, min=_SHORTEST_WAIT_SECONDS
        ),
        stop=lambda state: stop_after_delay(seconds)(state) or outage.is_over(state),
        before_sleep=outage.note,
        sleep=outage.sleep,
        reraise=True,
    )
    try:
        result = retrying(call)
    except _GivenUp as given_up:
        error = given_up.error
    else:
        outage.end()
        return result
    raise error


def why_transient(error: BaseException) -> str | None:
    """Return in a few words why an error will pass by itself; None for one that will not.

    Optuna and `store_errors` wrap what a driver raises: the first error of a database in the chain
    of causes decides.
    """
    if isinstance(error, TunerError) and (
        isinstance(error, SchemaError) or not isinstance(error, StoreError)
    ):
        return None
    for cause in _chain(error):
        if isinstance(cause, DBAPIError):
            found = _why(cause.orig)
            return "it closed the connection" if found is None and cause.connection_invalidated else found
        if isinstance(cause, (sqlite3.Error, psycopg.Error)):
            return _why(cause)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _why(error: BaseException | None) -> str | None:
    if isinstance(error, sqlite3.OperationalError):
        code: int = getattr(error, "sqlite_errorcode", 0)
        return "locked by another program" if code & 0xFF in _SQLITE_TRANSIENT else None
    if isinstance(error, psycopg.Error) and error.sqlstate is not None:
        return (
            "it closed the connection" if error.sqlstate.startswith("08") else _SQLSTATES.get(error.sqlstate)
        )
    if isinstance(error, psycopg.OperationalError):
        text = str(error)
        return next((why for part, why in _CONNECTING.items() if part in text), None)
    return None


class _GivenUp(BaseException):
    """Ends tenacity's loop in the middle of a wait."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class _Outage:
    """One outage: when it began, whether the user was told, and the waiting itself."""

    def __init__(self, on_wait: Callable[[str], None], should_give_up: Callable[[], bool]) -> None:
        self._on_wait, self._should_give_up = on_wait, should_give_up
        self._began = time.monotonic()
        self._told = False
        self._error: BaseException | None = None

    def is_over(self, state: RetryCallState) -> bool:
        return self._should_give_up()

    def note(self, state: RetryCallState) -> None:
        assert state.outcome is not None
        self._error = state.outcome.exception()
        assert self._error is not None
        late = state.attempt_number > 1 or time.monotonic() - self._began >= _SILENT_SECONDS
        if late and not self._told:
            self._told = True
            self._on_wait(f"the database is away ({why_transient(self._error)}), retrying")

    def sleep(self, seconds: float) -> None:
        assert self._error is not None
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._should_give_up():
                raise _GivenUp(self._error)
            time.sleep(min(_LOOK_SECONDS, left))

    def end(self) -> None:
        if self._told:
            self._on_wait(f"the database is back after {time.monotonic() - self._began:.0f} s")
