"""Progress of work in steps on stderr: the newest line on a terminal, the first and one every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from falaj.apps.cli.output.values import printable

LINE_EVERY_S = 10.0


@contextmanager
def step_progress(what: str) -> Iterator[Callable[[str], None]]:
    """Show the progress of `what`; call the yielded function with a line whenever there is one."""
    if not sys.stderr.isatty():
        yield _lines(what)
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(what)) as status:
        yield lambda line: status.update(Text(f"{what}: {printable(line)[:100]}"))


def _lines(what: str) -> Callable[[str], None]:
    last = float("-inf")

    def report(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_EVERY_S:
            last = time.monotonic()
            print(f"{what}: {printable(line)[:200]}", file=sys.stderr)

    return report
