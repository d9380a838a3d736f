"""The driver's heartbeat: a thread, so that a long trace or a slow disk is not taken for death."""

from __future__ import annotations

import contextlib
import threading

from tuner.errors import LeaseLost, StoreError
from tuner.search.session import Session
from tuner.store.drivers import Drivers
from tuner.store.engine import store_errors

BEAT_SECONDS = 5.0
_JOIN_SECONDS = 10.0


class Heart:
    """Beats while its body runs; a context manager.

    Attributes:
        stop_reason: Why this driver was asked to stop, or None.
        lease_lost: Whether others have given this driver up.
        others_lost: Whether another driver of the study has died.
    """

    def __init__(self, session: Session, seconds: float = BEAT_SECONDS) -> None:
        self._session, self._seconds = session, seconds
        self._drivers = Drivers(session.engine)  # without patience: the next beat will do
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)
        self.stop_reason: str | None = None
        self.lease_lost = False
        self.others_lost = False

    def __enter__(self) -> Heart:
        self.beat()
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end.set()
        self._thread.join(_JOIN_SECONDS)  # it may wait for a server that does not answer

    def beat(self) -> None:
        """Give a sign of life, and look around.

        A database that is away for a moment is no reason to worry: the next beat will do.
        """
        session = self._session
        driver_id = session.driver_id
        try:
            with store_errors(session.plan.url):
                self.stop_reason = self._drivers.beat(driver_id)
                self.others_lost = bool(self._drivers.lost(session.study.id))
        except LeaseLost:
            self.lease_lost = driver_id == session.driver_id  # else it has joined again meanwhile
        except StoreError:
            pass

    def _beat(self) -> None:
        while not self._end.wait(self._seconds):
            with contextlib.suppress(Exception):  # a thread that dies would be taken for a dead driver
                self.beat()
