"""Output of the demonstration: steps with their commands, progress bars, and the final table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import falaj as fj

console = Console(highlight=False)
figures: list[tuple[str, str]] = []


def step(title: str, *commands: str) -> None:
    console.print(f"\n[bold cyan]●[/] [bold]{title}[/]")
    for command in commands:
        for line in command.splitlines():
            console.print(f"    {line}", style="dim", markup=False, soft_wrap=True)


def say(words: str) -> None:
    console.print(f"    {words}", markup=False, soft_wrap=True)


def figure(what: str, value: str) -> None:
    """Add a figure to the final table."""
    figures.append((what, value))


def refused(call: Callable[[], object]) -> None:
    """Perform `call`, which must be refused, and print the reason."""
    try:
        call()
    except fj.FalajError as error:
        for line in f"refused [{error.code}] {error}".splitlines():
            say(line)
    else:
        raise SystemExit("this should have been refused")


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Add a duration to the final table."""
    began = time.perf_counter()
    yield
    figure(what, f"{time.perf_counter() - began:.1f} s")


@contextmanager
def bars() -> Iterator[Progress]:
    """Yield progress bars on a terminal; elsewhere only their final lines."""
    columns = (TextColumn("    {task.description}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        yield progress


def table(title: str, heads: list[str], rows: list[list[Any]]) -> None:
    shown = Table(*heads, title=title, title_justify="left")
    for row in rows:
        shown.add_row(*(str(cell) for cell in row))
    console.print(shown)


def closing_table() -> None:
    shown = Table(title="\nWhat was measured on this machine", show_header=False, title_justify="left")
    for row in figures:
        shown.add_row(*row)
    console.print(shown)
