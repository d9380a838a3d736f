"""The command `tuner app` in a real browser: pages draw, at the width of a desk and of a phone."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.app import data
from tests.conftest import ROOT, clean_environment

SCREENSHOTS = ROOT / "artifacts"
STARTS_WITHIN_SECONDS = 90
DRAWS_WITHIN_MS = 60_000
SWITCHES = [
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
# A browser must be found: a page that was never drawn has not been tested.
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a filled database."""
    url = f"sqlite:///{tmp_path_factory.mktemp('app')}/tuner.db"
    data.fill(url)
    data.fill(url, name="older", numbers=range(10), seed=2)
    data.fill(url, name="newest", numbers=range(12), budget_bytes=400 * data.MIB)
    return url


@pytest.fixture(scope="module")
def address(filled: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the running app."""
    folder, url = tmp_path_factory.mktemp("log"), filled
    port = _free_port()
    command = [sys.executable, "-P", "-m", "tuner", "app", "--no-browser", "--port", str(port)]
    environment = clean_environment(TUNER_STORAGE=url)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait_for(f"http://127.0.0.1:{port}/_stcore/health", process, folder / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            _end(process)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.fail(f"no browser is installed: none of {', '.join(BROWSERS)} is on PATH", pytrace=False)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, args=SWITCHES)
        yield launched
        launched.close()


@pytest.fixture(params=[1280, 390], ids=["desk", "phone"])
def page(request: pytest.FixtureRequest, browser: Browser) -> Iterator[Page]:
    """An empty page of a given width; afterwards, nothing may have gone wrong on it."""
    opened = browser.new_page(viewport={"width": request.param, "height": 1000})
    opened.set_default_timeout(DRAWS_WITHIN_MS)
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("dialog", lambda dialog: (errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    yield opened
    opened.close()
    assert errors == []


def test_front_draws_its_chart(page: Page, address: str) -> None:
    page.goto(f"{address}/?study=digits")
    _settled(page, "Front")
    chart = page.locator(".js-plotly-plot")
    expect(chart.locator(".scatterlayer path.point").first).to_be_visible(timeout=DRAWS_WITHIN_MS)
    # Every trial but the running one and that of infinite value, and those of the front once more.
    assert chart.locator(".scatterlayer path.point").count() == data.TRIALS - 2 + len(data.FRONT)
    expect(chart.get_by_text("budget", exact=True).first).to_be_visible()
    assert chart.locator(".shapelayer path").count() > 0
    legend, budget = chart.locator(".legend").first, chart.get_by_text("budget", exact=True).first
    legend_box, budget_box = legend.bounding_box(), budget.bounding_box()
    assert legend_box is not None
    assert budget_box is not None
    assert legend_box["y"] > budget_box["y"] + budget_box["height"], "the legend lies on the chart"
    box = chart.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= _width(page)
    _check_and_keep(page, "front")


def test_pages_are_reached_by_the_navigation(page: Page, address: str) -> None:
    page.goto(f"{address}/?study=digits")
    _settled(page, "Front")
    _follow(page, "Trials")
    expect(page.get_by_text(f"{data.TRIALS} of {data.TRIALS} trials")).to_be_visible()
    expect(page.get_by_text("Download as CSV")).to_be_visible()
    expect(page.get_by_test_id("stDataFrame").first).to_be_visible()
    _check_and_keep(page, "trials")
    _follow(page, "Trial")
    expect(page.locator(".js-plotly-plot .barlayer path").first).to_be_visible()
    expect(page.get_by_text("completed", exact=True).first).to_be_visible()
    assert f"trial={data.FRONT[-1]}" in page.url
    _check_and_keep(page, "trial")
    for title in ("Predictions", "Devices", "Search", "Compare"):
        _follow(page, title)
        expect(page.locator(".js-plotly-plot").first).to_be_visible()
        _check_and_keep(page, title.lower())


def test_csv_holds_every_trial(page: Page, address: str, tmp_path: Path) -> None:
    page.goto(f"{address}/trials?study=digits")
    _settled(page, "Trials")
    with page.expect_download() as download:
        page.get_by_text("Download as CSV").click()
    download.value.save_as(tmp_path / "trials.csv")
    lines = (tmp_path / "trials.csv").read_text().splitlines()
    assert lines[0].startswith("study,number,")
    assert [line.split(",")[1] for line in lines[1:]] == [str(number) for number in range(data.TRIALS)]


@pytest.mark.parametrize("page", [1280], indirect=True)
def test_what_a_person_does(page: Page, browser: Browser, address: str) -> None:
    """Choose a study, move the budget, brush, reload, share with a second window, clear."""
    page.goto(address)
    _settled(page, "Front")
    assert "study=newest" in page.url
    page.get_by_test_id("stSidebar").get_by_role("combobox").first.click()
    page.get_by_role("option", name="digits").click()
    expect(page.get_by_text("digits: accuracy (maximize)")).to_be_visible()
    expect(page.get_by_text("budget", exact=True).nth(1)).to_be_visible()
    slider = page.get_by_role("slider", name="What if the budget were … (MiB)")
    expect(slider).to_have_count(1)  # the other study's is going
    slider.focus()
    for _ in range(24):
        slider.press("ArrowLeft")
    expect(page.locator(".js-plotly-plot").get_by_text("what if").first).to_be_visible()
    expect(page.get_by_text("1000.0 MiB", exact=True)).to_be_visible()
    page.wait_for_url(re.compile("budget_mib=1000"))

    heading = page.get_by_role("heading", name=re.compile(r"^Selected: \d+ trials$"))
    for _ in range(5):  # the page looks again every 3 s, which may end a drag
        _brush(page)
        page.wait_for_timeout(4_000)
        if heading.is_visible():
            break
    expect(heading).to_be_visible()
    said = heading.inner_text()
    page.wait_for_url(re.compile("selected="))
    shared = page.url
    page.reload()
    _settled(page, "Front")
    expect(page.get_by_role("heading", name=said)).to_be_visible(timeout=DRAWS_WITHIN_MS)
    _check_and_keep(page, "front_selected")

    second = browser.new_context(viewport={"width": 1280, "height": 1000}).new_page()
    second.goto(shared)
    expect(second.get_by_role("heading", name=said)).to_be_visible(timeout=DRAWS_WITHIN_MS)
    expect(second.get_by_text("1000.0 MiB", exact=True)).to_be_visible()
    second.context.close()

    page.get_by_text("Clear the selection").click()
    expect(heading).to_have_count(0, timeout=DRAWS_WITHIN_MS)
    assert "selected=" not in page.url


@pytest.mark.parametrize("page", [1280], indirect=True)
def test_a_new_trial_appears_by_itself(page: Page, address: str, filled: str) -> None:
    """Without a click; a study that is made anew shows nothing of the old one."""
    data.fill(filled, name="growing", numbers=range(2))
    page.goto(f"{address}/?study=growing")
    _settled(page, "Front")
    completed = page.get_by_test_id("stMetric").filter(has_text="completed")
    expect(completed).to_contain_text("2", timeout=DRAWS_WITHIN_MS)
    data.grow(filled, "growing", range(2, 5))
    expect(completed).to_contain_text("5", timeout=DRAWS_WITHIN_MS)
    data.remove(filled, "growing")
    data.fill(filled, name="growing", numbers=range(1))
    page.reload()
    _settled(page, "Front")
    expect(completed).to_contain_text("1", timeout=DRAWS_WITHIN_MS)


def _brush(page: Page) -> None:
    """Drag a box over the left half of the plot."""
    surface = page.locator(".js-plotly-plot .nsewdrag").first
    expect(surface).to_be_visible()
    plot = surface.bounding_box()
    assert plot is not None
    page.mouse.move(plot["x"] + 5, plot["y"] + 5)
    page.mouse.down()
    page.mouse.move(plot["x"] + plot["width"] / 3, plot["y"] + plot["height"] / 2, steps=5)
    page.mouse.move(plot["x"] + plot["width"] / 2, plot["y"] + plot["height"] - 5, steps=5)
    page.mouse.up()


def test_hostile_reason_is_text(page: Page, address: str) -> None:
    page.goto(f"{address}/trial?study=digits&trial={data.PRUNED[0]}")
    _settled(page, "Trial")
    expect(page.get_by_text(f"Reason: {data.HOSTILE}").first).to_be_visible()
    assert page.locator("img[src='x']").count() == 0
    _check_and_keep(page, "trial_pruned")


def _width(page: Page) -> int:
    size = page.viewport_size
    assert size is not None
    return size["width"]


def _settled(page: Page, title: str) -> None:
    """Wait until a page has its title and its script has run to its end."""
    expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible(timeout=DRAWS_WITHIN_MS)
    app = page.get_by_test_id("stApp")
    expect(app).to_have_attribute("data-test-script-state", "notRunning", timeout=DRAWS_WITHIN_MS)


def _follow(page: Page, title: str) -> None:
    """Go to another page by its link; on a phone the navigation is folded away until it is asked for."""
    link = page.get_by_test_id("stSidebarNavLink").filter(has_text=re.compile(rf"{title}$"))
    unfold = page.get_by_test_id("stExpandSidebarButton")
    if unfold.is_visible():
        unfold.click()
    link.click()
    _settled(page, title)
    if _width(page) < 600:  # there it lies over the page
        page.get_by_test_id("stSidebarCollapseButton").locator("button").click()


def _check_and_keep(page: Page, name: str) -> None:
    """Check that nothing failed and nothing sticks out sideways; keep a picture."""
    expect(page.get_by_test_id("stException")).to_have_count(0)
    assert "Traceback (most recent" not in page.locator("body").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= _width(page)
    SCREENSHOTS.mkdir(exist_ok=True)
    picture = SCREENSHOTS / f"{name}_{_width(page)}.png"
    page.screenshot(path=picture, full_page=True)
    assert picture.stat().st_size > 5_000  # an empty page is smaller


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + STARTS_WITHIN_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"the app did not answer:\n{log.read_text()}", pytrace=False)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command and the server below it, as Ctrl-C in a terminal does."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
