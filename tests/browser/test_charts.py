"""Every chart of the console, drawn by a browser."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from console_pictures import SCREENSHOTS
from polling import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow

GALLERY = Path(__file__).parent.parent / "chart_gallery.py"
CHARTS = ("lines", "smooth", "bars", "pair", "heat", "gantt", "graph", "pareto", "parallel")


@pytest.fixture(scope="module")
def gallery(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a page with every chart."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"NICEGUI_STORAGE_PATH": str(tmp_path_factory.mktemp("gallery"))}
    environment.pop("PYTEST_CURRENT_TEST", None)
    with subprocess.Popen([sys.executable, GALLERY, str(port)], env=environment) as process:
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            try:
                return httpx.get(f"{url}/light").status_code == 200
            except httpx.TransportError:
                return False

        eventually(answers)
        yield url
        process.kill()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_chart_is_drawn(gallery: str, browser: Browser, theme: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)

    page.goto(f"{gallery}/{theme}")

    for name in CHARTS:
        page.locator(f"#{name} canvas").first.wait_for()
        assert page.locator(f"#{name} .chart").get_attribute("aria-label")
    page.wait_for_load_state("networkidle")
    SCREENSHOTS.mkdir(exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"charts-{width}-{theme}.png", full_page=True)
    assert problems == []
    assert page.title() == "NiceGUI"  # no script of a name has run
    page.close()
