"""A walk through the pages of a console with the demonstration's data: what each must fulfil, and its pictures."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import falaj as fj
from polling import PATIENCE_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Request, ViewportSize

ROOT = Path(__file__).parent.parent
SCREENSHOTS = ROOT / ".screenshots"
IMAGES = ROOT / "docs" / "images" / "console"
IS_WRITTEN = os.environ.get("FALAJ_WRITE_PICTURES") == "1"
"""Whether the pictures of the documentation are written anew: make pictures."""
WIDTHS = {"wide": (1280, 900), "phone": (390, 844)}
THEMES = ("light", "dark")
LEAST_PX, MOST_PX = 480, 1300
"""Height of the pictures in the documentation; what is below is more of the same."""
COLOURS = 256
CUT_PX = {"endpoint": 960}
"""Pictures that end earlier: the live charts below are empty, since nobody sends requests."""
WITHOUT_PAGE = ("sign-in", "search")
"""Pictures of what is no page of its own."""

TABS = "nav[aria-label='Parts of this page'] a.tab:not(.here)"
EMPTY_STATES = "main .state-card .state-title"
IS_DRAWN = """() => {
  const drawer = document.querySelector('.q-drawer')?.getBoundingClientRect();
  const indent = parseFloat(getComputedStyle(document.querySelector('.q-page-container') ?? document.body).paddingLeft);
  const isWide = innerWidth >= 1024;
  const isSet = !drawer || (isWide ? drawer.left >= 0 && indent > 0 : drawer.right <= 0 && indent === 0);
  return isSet && [...document.querySelectorAll('.chart')].every(chart => {
    const canvas = chart.querySelector('canvas');
    return canvas && Math.abs(canvas.clientWidth - chart.clientWidth) < 2;
  });
}"""
OVER_PX = "document.documentElement.scrollWidth - window.innerWidth"
CONTENT_PX = "Math.ceil(document.querySelector('main')?.getBoundingClientRect().bottom ?? 0)"

Choice = Callable[[fj.Platform], str]
OBJECTS: dict[str, Choice] = {
    "workspace": lambda platform: "default",
    "run": lambda platform: runs_named(platform, "train-torch")[0],
    "job": lambda platform: next(job.id for job in platform.jobs.list().items if job.name == "train-torch"),
    "study": lambda platform: platform.studies.list().items[0].id,
    "view": lambda platform: "carrier_delays",
    "training_set": lambda platform: "jan-may",
    "model": lambda platform: "flight-delays",
    "version": lambda platform: "1",
    "endpoint": lambda platform: "delays",
    "monitor": lambda platform: "delays",
    "pipeline": lambda platform: "retrain-delays",
    "object": lambda platform: platform.models.version("flight-delays@1").id,
    "seq": lambda platform: "100",
}
"""What stands for each parameter in the address of a page, in the data of the demonstration."""
QUERIES: dict[str, Choice] = {
    "compare-runs": lambda platform: f"?runs={','.join(runs_named(platform, 'train-'))}",
    "difference-of-versions": lambda platform: "?before=1&after=2",
}
NOT_IN_THE_DATA: dict[str, list[str]] = {
    "costs": ["No workspace has a budget."],
    "feature-view": ["No file was refused lately."],
    "feature-view-quarantine": ["No row is quarantined."],
    "groups": ["There is no group."],
    "policies": ["No policy was published: the built-in roles decide."],
    "queues": ["No job waits.", "No workspace has a budget."],
    "run": ["No dataset was logged."],
    "webhooks": ["No webhook receives events of this workspace."],
}
"""What pages say of things that the demonstration does not make."""


def page_paths(platform: fj.Platform) -> dict[str, str]:
    """Return the path of every page by its name; a page with a new parameter needs an entry in `OBJECTS`."""
    from falaj.apps.console.application import find_pages

    chosen = {name: quote(choose(platform), safe="") for name, choose in OBJECTS.items()}
    paths = {page_name(page.title): page.path.format_map(chosen) for page in find_pages()}
    return {name: path + QUERIES.get(name, lambda _: "")(platform) for name, path in paths.items()}


def page_name(title: str) -> str:
    """Return the name of a page in the names of its pictures."""
    return title.lower().replace(" ", "-")


def runs_named(platform: fj.Platform, beginning: str) -> list[str]:
    found = platform.runs.list(where=f"attributes.run_name LIKE '{beginning}%'").items
    return [run.id for run in found]


def window_size(width: str) -> ViewportSize:
    """Return the size of a window that is `wide`, or that of a `phone`."""
    return {"width": WIDTHS[width][0], "height": WIDTHS[width][1]}


def documented_pictures() -> set[str]:
    """Return the names of the pictures that the documentation shows."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return {name for page in pages for name in re.findall(r"images/console/([\w-]+)\.png", page.read_text())}


class ConsoleWalk:
    """A browser that goes from page to page of a console, and gathers the problems that it sees.

    Problems are errors of scripts, requests to another host, error cards, empty states that the data does not explain,
    and pages that are wider than the window.
    """

    def __init__(self, browser: Browser, console: str) -> None:
        self.problems: list[str] = []
        self.seen: set[str] = set()
        self._console = console
        self._context = browser.new_context(
            base_url=console, timezone_id="Asia/Dubai", reduced_motion="reduce", color_scheme="light"
        )
        self._context.set_default_timeout(PATIENCE_S * 1000)
        self.page = self._context.new_page()
        self._context.on("request", self._check_host)
        self.page.on("pageerror", lambda error: self._note(str(error)))
        self.page.on("console", lambda said: self._note(said.text) if said.type == "error" else None)
        self._theme, self._name = THEMES[0], ""

    def use(self, theme: str) -> None:
        """Show the pages that follow in a theme."""
        self._theme = theme
        self._context.add_cookies([{"name": "falaj_theme", "value": theme, "url": self._console}])

    def visit(self, name: str, path: str) -> dict[str, str]:
        """Open a page, check it and take its pictures; return the paths of its other tabs by their names."""
        self._name = name
        self.page.goto(path)
        self.page.wait_for_selector("main .title, main .state-card")
        empty = self.page.locator(EMPTY_STATES).all_inner_texts()
        if empty != NOT_IN_THE_DATA.get(name, []):
            self._note(f"shows {empty}")
        links = self.page.locator(TABS).evaluate_all("links => links.map(each => each.getAttribute('href'))")
        self.take_pictures(name)
        return {f"{name}-{tab}": link for link in links if (tab := link.partition("tab=")[2])}

    def take_pictures(self, name: str, widths: Iterable[str] = tuple(WIDTHS)) -> None:
        """Write pictures of what is open, by default wide and on a phone."""
        SCREENSHOTS.mkdir(exist_ok=True)
        self._name = name
        self.seen.add(name)
        for width in widths:
            self._resize(*WIDTHS[width])
            file = SCREENSHOTS / f"{name}-{width}-{self._theme}.png"
            self.page.screenshot(path=file, full_page=True)
            if (over_px := self.page.evaluate(OVER_PX)) > 0:
                self._note(f"is {over_px} px wider than the window ({width})")
        self._resize(*WIDTHS["wide"])
        if IS_WRITTEN and self._theme == THEMES[0] and name in documented_pictures():
            self._write_documented(name)

    def _write_documented(self, name: str) -> None:
        """Write the picture of the documentation, with few colours: it is kept in the repository."""
        from PIL import Image

        width_px, height_px = WIDTHS["wide"]
        self._resize(
            width_px,
            min(max(self.page.evaluate(CONTENT_PX) or height_px, LEAST_PX), CUT_PX.get(name, MOST_PX)),
        )
        picture = Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")
        IMAGES.mkdir(parents=True, exist_ok=True)
        few = picture.quantize(
            COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )  # keeps rare ones
        few.save(IMAGES / f"{name}.png", optimize=True)
        self._resize(width_px, height_px)

    def _resize(self, width_px: int, height_px: int) -> None:
        self.page.set_viewport_size({"width": width_px, "height": height_px})
        self.page.wait_for_function(IS_DRAWN)

    def _check_host(self, request: Request) -> None:
        asked = urlsplit(request.url)
        if asked.scheme not in ("data", "blob") and asked.netloc != urlsplit(self._console).netloc:
            self._note(f"asks for {request.url}")

    def _note(self, words: str) -> None:
        self.problems.append(f"{self._name} ({self._theme}): {words}")
