"""A table that is refreshed on the terminal until it is interrupted."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

from falaj.apps.cli.output.tables import count_fitting, widths
from falaj.apps.cli.output.values import printable
from falaj.errors import Interrupted, Unavailable

Screen = tuple[Sequence[str], Sequence[Sequence[str]]]
"""The lines above a table, and its rows."""


def refresh(poll: Callable[[], Screen], headings: Sequence[str], *, every_s: float) -> None:
    """Refresh the terminal until it is interrupted; while the platform is unavailable, say so and retry."""
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(highlight=False, markup=False), screen=True, auto_refresh=False) as screen:
        while True:
            try:
                screen.update(_painted(*poll(), headings), refresh=True)
            except (Unavailable, Interrupted) as error:
                screen.update(printable(f"the platform does not answer: {error.message}"), refresh=True)
            time.sleep(every_s)


def _painted(head: Sequence[str], rows: Sequence[Sequence[str]], headings: Sequence[str]) -> Any:
    """Return the part that fits the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    size_of_terminal = shutil.get_terminal_size()
    shown = rows[: max(size_of_terminal.lines - len(head) - 4, 1)]
    count = count_fitting(widths([headings, *shown]), size_of_terminal.columns)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in headings[:count]:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for row in shown:
        table.add_row(*(Text(cell) for cell in row[:count]))
    more = [Text(f"and {len(rows) - len(shown)} more")] if len(rows) > len(shown) else []
    return Group(*(Text(line) for line in head), Text(""), table, *more, Text("Ctrl-C to quit", style="dim"))
