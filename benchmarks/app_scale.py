"""How long the app takes to show a study of any size, in a real browser, on SQLite and PostgreSQL.

For each database and size: a study is made up (app_data.py), the app is started, and each page is opened
`--repeats` times in a new window, the first time with nothing cached. First paint: until the page's chart
or table is drawn and its script has ended.

Run as: python benchmarks/app_scale.py [--sizes 1000 10000] [--databases sqlite] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from benchmarks.app_data import fill
from benchmarks.postgresql import Server

ROOT = Path(__file__).resolve().parents[1]
STUDY = "made_up"
DRAWN = {
    "": ".js-plotly-plot .main-svg",
    "trials": "[data-testid=stDataFrame]",
    "trial": ".js-plotly-plot .main-svg",
    "predictions": ".js-plotly-plot .main-svg",
    "devices": ".js-plotly-plot .main-svg",
    "search": ".js-plotly-plot .main-svg",
    "compare": ".js-plotly-plot .main-svg",
}
_SWITCHES = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_MOST_MS = 120_000


@contextlib.contextmanager
def app(url: str) -> Iterator[str]:
    """Run the app on a database; yield its address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, "-P", "-m", "tuner", "app", "--no-browser", "--port", str(port)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "TUNER_STORAGE": url},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/_stcore/health", timeout=5).close()
                break
            time.sleep(0.2)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(30)


def first_paint(browser: Browser, address: str, page: str) -> float:
    """Return the seconds until a page is drawn in a new window."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    window = context.new_page()
    start = time.perf_counter()
    window.goto(f"{address}/{page}?study={STUDY}")
    window.locator(DRAWN[page]).first.wait_for(timeout=_MOST_MS)
    window.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for(timeout=_MOST_MS)
    seconds = time.perf_counter() - start
    context.close()
    return seconds


def measure(url: str, size: int, repeats: int) -> dict[str, list[float]]:
    """Return the times by page, the first of each with nothing cached."""
    fill(url, STUDY, size)
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    with app(url) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=_SWITCHES)
        first_paint(browser, address, "compare")  # Streamlit and the browser start
        return {
            page or "front": [first_paint(browser, address, page) for _ in range(repeats)] for page in DRAWN
        }


def main() -> None:
    """Print a table per database; write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1_000, 10_000, 100_000])
    parser.add_argument("--databases", nargs="+", default=["sqlite", "postgresql"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    for database in arguments.databases:
        for size in arguments.sizes:
            with contextlib.ExitStack() as closing:
                folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="tuner-scale-"))
                server = closing.enter_context(Server()) if database == "postgresql" else None
                url = server.url if server is not None else f"sqlite:///{folder}/tuner.db"
                pages = measure(url, size, arguments.repeats)
            results.append({"database": database, "trials": size, "seconds": pages})
            print(f"\n{database}, {size:,} trials: seconds to first paint")
            print(f"{'page':<14}{'nothing cached':>16}{'median of next':>16}")
            for page, seconds in pages.items():
                rest = statistics.median(seconds[1:] or seconds)
                print(f"{page:<14}{seconds[0]:>16.2f}{rest:>16.2f}", flush=True)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
