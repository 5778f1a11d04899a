"""Progress on stderr: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from falaj.records.sizes import format_size

LINE_EVERY_S = 10.0

Advance = Callable[[int], None]


@contextmanager
def progress(what: str, *, total: int | None, unit: Literal["bytes", "entries", "rows"]) -> Iterator[Advance]:
    """Show the progress of `what`; call the yielded function with every amount that is done."""
    if sys.stderr.isatty():
        with _bar(what, total, unit) as advance:
            yield advance
    else:
        yield _lines(what, total, unit)


def count_bytes(chunks: Iterable[bytes], advance: Advance) -> Iterator[bytes]:
    """Yield the chunks, and report the length of each to `advance`."""
    for chunk in chunks:
        advance(len(chunk))
        yield chunk


@contextmanager
def _bar(what: str, total: int | None, unit: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amounts = (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *amounts, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.update(task, advance=amount)


def _lines(what: str, total: int | None, unit: str) -> Advance:
    done, last = 0, time.monotonic()

    def words(amount: int) -> str:
        return format_size(amount) if unit == "bytes" else f"{amount} {unit}"

    def advance(amount: int) -> None:
        nonlocal done, last
        done += amount
        if time.monotonic() - last >= LINE_EVERY_S:
            last = time.monotonic()
            print(f"{what}: {words(done)}" + (f" of {words(total)}" if total else ""), file=sys.stderr)

    return advance
