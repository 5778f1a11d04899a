"""The console in a real browser: its first page, its memory, twenty viewers of live pages, and a table of 10,000 runs.

The peer of the first page and of the memory is the framework itself, with a page of one label. The peer of the
viewers is the same platform without any. `--runs 1000` makes it quicker.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import falaj as fj
from harness import (
    Result,
    Rule,
    cpu_seconds,
    environment,
    free_port,
    process_tree,
    pss_mb,
    report,
    running,
    say,
    wait_until_ready,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

VIEWERS, WATCHED_S, EVERY_S, LINGER_S = 20, 20.0, 1.0, 11.0
POINTS = 1_000_000
BARE = """
import sys
from nicegui import ui
@ui.page("/")
def page() -> None:
    ui.label("hello").classes("bare")
ui.run(host="127.0.0.1", port=int(sys.argv[1]), show=False, reload=False)
"""


@dataclass
class Platform:
    """A running platform, and where its console is."""

    pid: int
    api: fj.Platform
    url: str

    @property
    def console_pid(self) -> int:
        return next(pid for pid in process_tree(self.pid) if b"console.process" in _command(pid))


def main() -> None:
    from playwright.sync_api import sync_playwright

    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--runs", type=int, default=10_000)
    runs = asked.parse_args().runs
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        os.environ["FALAJ_CONFIG_DIR"] = str(Path(folder) / "config")
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        bare = measure_bare(browser, Path(folder))
        plotted = make_data(Path(folder), runs)
        with started(Path(folder)) as platform:
            results = first_page(browser, platform, bare)
            results += table(browser, platform, runs)
            results += curve(browser, platform, plotted)
            results += viewers(browser, platform)
            results += viewers_of_run(browser, platform)
        browser.close()
    report("console", results)


def make_data(folder: Path, runs: int) -> str:
    """Log runs, and one run of a million points; return its id."""
    say(f"logging {runs} runs and {POINTS} points …")
    with fj.open(folder / "home") as platform:
        platform.experiments.create("bench")
        for number in range(runs):
            made = platform.runs.start("bench", name=f"run-{number}", params={"lr": str(number % 7)})
            value = (number * 2654435761 % 1000) / 1000
            platform.runs.log_batch(made.id, metrics=[{"key": "auc", "value": value, "step": 1}])
        long = platform.runs.start("bench", name="long")
        for begin in range(0, POINTS, 10_000):
            points = [
                {"key": "loss", "value": 1 / (1 + at), "step": at} for at in range(begin, begin + 10_000)
            ]
            platform.runs.log_metrics(long.id, points=points)
        return str(long.id)


@contextmanager
def started(folder: Path) -> Iterator[Platform]:
    """Run a platform with its console on the home in `folder`."""
    env = environment(FALAJ_HOME=str(folder / "home"), FALAJ_CONSOLE="on")
    command = [sys.executable, "-m", "falaj", "up", "--port", "0"]
    with running(command, cwd=folder, env=env) as pid:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            found = fj_status(folder)
            if found is not None:
                break
            time.sleep(0.2)
        api, console = found or ("", "")
        wait_until_ready(f"{api}/readyz", pid=pid)
        wait_until_ready(f"{console}/healthz", pid=pid)
        with fj.connect(api) as platform:
            yield Platform(pid, platform, console)


def fj_status(folder: Path) -> tuple[str, str] | None:
    """Return the addresses of API and console, as soon as they are known."""
    from falaj.apps.supervisor import status

    found = status(folder / "home")
    return (found.url, found.console) if found.url and found.console else None


def measure_bare(browser: Browser, folder: Path) -> tuple[float, float, float]:
    """Return seconds cold and warm, and MB, of the framework with a page of one label."""
    program, port = folder / "bare.py", free_port()
    program.write_text(BARE)
    with running([sys.executable, program, str(port)], cwd=folder, env=environment()) as pid:
        wait_until_ready(f"http://127.0.0.1:{port}/", pid=pid)
        memory = pss_mb(pid)
        page = browser.new_context().new_page()
        cold = seconds(lambda: page.goto(f"http://127.0.0.1:{port}/"), page, ".bare")
        warm = seconds(page.reload, page, ".bare")
        page.context.close()
    return cold, warm, memory


def first_page(browser: Browser, platform: Platform, bare: tuple[float, float, float]) -> list[Result]:
    memory = pss_mb(platform.console_pid)
    code = platform.api.tokens.sign_in_link().code
    page = browser.new_context().new_page()
    cold = seconds(lambda: page.goto(f"{platform.url}/#code={code}"), page, ".layers")
    warm = min(seconds(page.reload, page, ".layers") for _ in range(3))
    page.context.close()
    return [
        Result("s to the first page, cold", cold, bare[0], 4.0, Rule.FALAJ_AT_MOST),
        Result("s to the first page, warm", warm, bare[1], 2.0, Rule.FALAJ_AT_MOST),
        Result("MB of the idle console", memory, bare[2], 150.0, Rule.FALAJ_AT_MOST),
    ]


def table(browser: Browser, platform: Platform, runs: int) -> list[Result]:
    page = signed_in(browser, platform)
    page.goto(f"{platform.url}/w/default/runs?metrics=auc")
    first = page.locator(".data-table tbody tr").first
    first.wait_for()
    times = []
    for _ in range(4):
        before, began = first.inner_text(), time.perf_counter()
        page.locator(".data-table th", has_text="auc").click()
        while first.inner_text() == before:
            page.wait_for_timeout(5)
        times.append(time.perf_counter() - began)
    begin = time.perf_counter()
    platform.api.runs.list(order_by=("metrics.auc DESC",), limit=50)
    asked = time.perf_counter() - begin
    page.context.close()
    return [
        Result(f"s to sort {runs} runs (peer: the API alone)", min(times), asked, 0.5, Rule.FALAJ_AT_MOST)
    ]


def curve(browser: Browser, platform: Platform, run: str) -> list[Result]:
    """Measure the page of a run with a million points, from the click to the plot."""
    page = signed_in(browser, platform)
    target = f"{platform.url}/w/default/runs/{run}"
    if page.goto(target).status != 200:  # type: ignore[union-attr]
        say("there is no page of a run: not measured")
        page.context.close()
        return []
    times = [seconds(lambda: page.goto(target), page, ".chart canvas") for _ in range(3)]
    begin = time.perf_counter()
    platform.api.runs.curves(run, keys=("loss",))
    asked = time.perf_counter() - begin
    page.context.close()
    return [
        Result("s to plot a million points (peer: the API alone)", min(times), asked, 1.0, Rule.FALAJ_AT_MOST)
    ]


def viewers(browser: Browser, platform: Platform) -> list[Result]:
    """Measure all processes of the platform while people look at the overview, and something is made every second."""

    def change(_number: int) -> None:
        platform.api.experiments.create(f"change-{time.monotonic_ns()}")

    what = f"% of a core for {VIEWERS} viewers of the overview, a change a second (peer: none)"
    return watched(browser, platform, "/w/default", ".layers", change, what)


def viewers_of_run(browser: Browser, platform: Platform) -> list[Result]:
    """Measure the same while people look at the curves of one run, which gets points every second."""
    run = platform.api.runs.start("bench", name="live").id

    def change(number: int) -> None:
        points = [{"key": key, "value": 1 / (2 + number), "step": number} for key in ("loss", "auc", "lr")]
        platform.api.runs.log_metrics(run, points=points)

    change(-1)
    what = f"% of a core for {VIEWERS} viewers of a run, points every second (peer: none)"
    return watched(browser, platform, f"/w/default/runs/{run}", ".chart canvas", change, what)


def watched(
    browser: Browser, platform: Platform, path: str, selector: str, change: Callable[[int], None], what: str
) -> list[Result]:
    alone = load(platform, change)
    say(f"opening {VIEWERS} browsers …")
    pages = [signed_in(browser, platform) for _ in range(VIEWERS)]
    for page in pages:
        page.goto(f"{platform.url}{path}")
        page.wait_for_selector(selector)
    time.sleep(LINGER_S)  # the streams of the first pages end
    with_viewers = load(platform, change)
    for page in pages:
        page.context.close()
    time.sleep(2 * LINGER_S)  # the pages and their streams end
    return [Result(what, with_viewers - alone, alone, 30.0, Rule.FALAJ_AT_MOST)]


def load(platform: Platform, change: Callable[[int], None]) -> float:
    """Return the percent of a core that the platform takes while something changes every second."""
    began, cpu, number = time.monotonic(), cpu_seconds(platform.pid), 0
    while (passed := time.monotonic() - began) < WATCHED_S:
        change(number)
        number += 1
        time.sleep(max(0.0, number * EVERY_S - passed))
    return 100 * (cpu_seconds(platform.pid) - cpu) / (time.monotonic() - began)


def signed_in(browser: Browser, platform: Platform) -> Page:
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.goto(f"{platform.url}/#code={platform.api.tokens.sign_in_link().code}")
    page.wait_for_url(re.compile("/w/"))
    return page


def seconds(act: object, page: Page, selector: str) -> float:
    began = time.perf_counter()
    act()  # type: ignore[operator]
    page.wait_for_selector(selector, timeout=60_000)
    return time.perf_counter() - began


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    main()
