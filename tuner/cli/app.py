"""`tuner app`: open the app."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

import tuner
from tuner.cli.options import storage_option, storage_url
from tuner.settings import resolve


@click.command("app", short_help="Open the app: fronts, trials, predictions.")
@storage_option
@click.option("--port", metavar="N", help="Port  [default: 8501]")
@click.option("--address", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--browser/--no-browser", default=True, help="Open a browser.")
def command(storage: str | None, address: str, browser: bool, **flags: Any) -> None:
    """Open the app, which shows fronts, trials and predictions, and never writes.

    It has no login: to share it, put it behind one (a reverse proxy), and keep the address local.
    """
    from tuner.store.engine import describe_url

    url = storage_url(storage)
    port = resolve(flags, ["port"])["port"].value
    main = app_folder() / "main.py"
    command_line = [
        *(sys.executable, "-P", "-m", "streamlit", "run", str(main)),
        *("--server.port", str(port), "--server.address", address),
        *("--server.headless", "false" if browser else "true"),
        *("--browser.gatherUsageStats", "false", "--server.fileWatcherType", "none"),
        *("--client.toolbarMode", "minimal"),
    ]
    click.echo(f"showing {describe_url(url)} at http://{address}:{port} (Ctrl-C ends it)", err=True)
    # The URL may hold a password: it travels in the environment, never on a command line.
    environment = {
        **os.environ,
        "TUNER_STORAGE": url.render_as_string(hide_password=False),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(main.parents[1]), os.environ.get("PYTHONPATH")])),
    }
    sys.stderr.flush()
    os.execve(sys.executable, command_line, environment)  # noqa: S606 - whoever stops this stops Streamlit


def app_folder() -> Path:
    """Return the app's folder: inside the installed package, or beside it in a checkout."""
    package = Path(tuner.__file__).parent
    bundled = package / "_bundled" / "app"
    return bundled if bundled.is_dir() else package.parent / "app"
