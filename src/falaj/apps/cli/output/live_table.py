"""The frame of commands that show a table until they are ended: `falaj jobs top` and `falaj endpoints top`."""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from falaj.apps.cli.generation import parsing
from falaj.apps.cli.output.tables import GAP, align, count_fitting, on_terminal, widths
from falaj.apps.cli.output.values import format_duration, printable
from falaj.apps.cli.session import Session
from falaj.errors import Interrupted, InvalidInput, Unavailable

T = TypeVar("T")

Once = Annotated[bool, typer.Option("--once", help="Print it once.")]
Every = Annotated[str, typer.Option(metavar="TIME", help="How often it is refreshed. (default 2s)")]

LOOK_S = 0.2
"""How long it may take until the size of the terminal is looked at again."""
NARROWEST = 12
"""To how many characters a column is cut before another one is left out."""


class Screen(NamedTuple):
    """The lines above a table, and the table; of the `shrinking` columns, long cells are cut before columns are."""

    head: Sequence[str]
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    shrinking: Collection[str] = ()


def parse_interval(every: str) -> timedelta:
    """Return how often a table is refreshed, as typed behind --every."""
    pause = parsing.parse_duration(every, "--every")
    if isinstance(pause, str) or pause.total_seconds() < 1:
        raise InvalidInput.at("--every", given=every, allowed="at least 1s", fix="--every 2s")
    return pause


def show_live(
    session: Session,
    poll: Callable[[], T],
    screen: Callable[[T], Screen],
    *,
    document: Callable[[T], Any] = lambda found: found,
    once: bool,
    every: timedelta,
) -> int:
    """Show what `poll` finds until q or Ctrl-C; once where it is asked for, as JSON, or where there is no terminal."""
    if once or session.json or not on_terminal():
        found = poll()
        session.show(document(found), lambda _: print("\n".join(_lines(screen(found)))))
        return 0
    try:
        _refresh(lambda: screen(poll()), every=every)
    except KeyboardInterrupt:
        return 0
    return 0


def _lines(shown: Screen) -> list[str]:
    table = ["", *align([shown.headings, *shown.rows])] if shown.rows else []
    return [*shown.head, *table]


def _refresh(poll: Callable[[], Screen], *, every: timedelta) -> None:
    """Refresh the terminal until q is pressed; while the platform is unavailable, say so and retry."""
    from rich.console import Console
    from rich.live import Live

    footer = f"q to quit, space to refresh; every {format_duration(every)}"
    shown = Screen(["measuring …"], [], [])
    with (
        _keys() as pressed,
        Live(console=Console(highlight=False, markup=False), screen=True, auto_refresh=False) as live,
    ):
        live.update(paint(shown, footer), refresh=True)
        while True:
            try:
                shown = poll()
            except (Unavailable, Interrupted) as error:
                shown = Screen([printable(f"the platform does not answer: {error.message}")], [], [])
            due, size = time.monotonic() + every.total_seconds(), None
            while (left_s := due - time.monotonic()) > 0:
                if size != (size := shutil.get_terminal_size()):
                    live.update(paint(shown, footer), refresh=True)
                key = pressed(min(left_s, LOOK_S))
                if key in ("q", "Q"):
                    return
                if key == " ":
                    break


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Return a function that waits for a key for so many seconds, and returns it, or nothing."""
    if not sys.stdin.isatty():
        yield _pause
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pressed(wait_s: float) -> str:
        ready, _, _ = select.select([terminal], [], [], wait_s)
        return os.read(terminal, 1).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(terminal)
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _pause(wait_s: float) -> str:
    time.sleep(wait_s)
    return ""


def paint(shown: Screen, footer: str = "") -> Any:
    """Return the part of a screen that fits the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    size_of_terminal = shutil.get_terminal_size()
    rows = shown.rows[: max(size_of_terminal.lines - len(shown.head) - 4, 1)]
    head = [Text(line, no_wrap=True, overflow="ellipsis") for line in shown.head]
    last = Text(footer, style="dim", no_wrap=True)
    if not rows:
        return Group(*head, Text(""), last)
    wide, count = _fitted(shown, rows, size_of_terminal.columns)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for name, width in zip(shown.headings[:count], wide, strict=False):
        table.add_column(name, no_wrap=True, overflow="ellipsis", width=width)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row[:count]))
    more = [Text(f"and {len(shown.rows) - len(rows)} more")] if len(shown.rows) > len(rows) else []
    return Group(*head, Text(""), table, *more, last)


def _fitted(shown: Screen, rows: Sequence[Sequence[str]], available: int) -> tuple[list[int], int]:
    """Return the widths of the columns, and how many of them fit; those that shrink get what the others leave."""
    wide = widths([shown.headings, *rows])
    least = [
        min(width, NARROWEST) if name in shown.shrinking else width
        for name, width in zip(shown.headings, wide, strict=True)
    ]
    count = count_fitting(least, available)
    spare = max(available - sum(least[:count]) - GAP * (count - 1), 0)
    for column in range(count):
        given = min(wide[column] - least[column], spare)
        least[column] += given
        spare -= given
    return least, count
