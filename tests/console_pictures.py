"""Pictures of several pages, with one sign-in for each theme and width."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from consoles import SCREENSHOTS, WIDTHS, RunningConsole


def take_pictures(console: RunningConsole, pages: Mapping[str, str], *, wait_for: str) -> list[Path]:
    """Write pictures of pages, by name and path, light and dark, wide and on a phone; return them.

    Nothing may be wider than the window: a page that scrolls sideways on a phone fails.
    """
    SCREENSHOTS.mkdir(exist_ok=True)
    made = []
    for width in WIDTHS:
        for dark in (False, True):
            context = console.signed_in(console.token(), width=width, dark=dark)
            page = context.new_page()
            for name, path in pages.items():
                page.goto(path)
                page.wait_for_selector(wait_for)
                page.wait_for_timeout(300)  # charts draw after the page is there
                file = SCREENSHOTS / f"{name}-{width}-{'dark' if dark else 'light'}.png"
                page.screenshot(path=file, full_page=True)
                over = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
                assert over <= 0, f"{path} is {over} px wider than the window ({width})"
                made.append(file)
            context.close()
    return made
