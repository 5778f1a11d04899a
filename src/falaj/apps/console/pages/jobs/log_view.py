"""A log that follows its source: its last lines, as text."""

from __future__ import annotations

import asyncio
import codecs
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from nicegui import ui

from falaj.apps.console.page import PageContext
from falaj.errors import FalajError, Unauthenticated
from falaj.governance.operations.caller import start_thread
from falaj.sdk.platform import Platform

LINES = 1000
"""The browser keeps so many lines; the command beside the log shows all."""
LINE_CHARACTERS = 2000
GATHER_S = 0.3
"""Lines are gathered for so long before they are sent to the browser."""
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]")
"""Terminal sequences, control characters, and marks that turn the direction of what follows."""


@dataclass
class LogLines:
    """Splits pieces of a log into lines for people. A carriage return starts a line over, as on a terminal."""

    kept: list[str] = field(default_factory=list)
    _rest: str = ""
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def add(self, piece: bytes) -> None:
        """Take the next bytes; only the last lines are kept."""
        *whole, self._rest = (self._rest + self._decoder.decode(piece)).split("\n")
        self._rest = self._rest[-LINE_CHARACTERS * 4 :]
        self.kept = [*self.kept, *(clean_line(line) for line in whole)][-LINES:]

    def take(self) -> list[str]:
        """Return the lines that came since the last call."""
        found, self.kept = self.kept, []
        return found

    def end(self) -> None:
        """Take what stands behind the last line break as a line, too."""
        if self._rest:
            self.kept.append(clean_line(self._rest))
            self._rest = ""


def clean_line(line: str) -> str:
    """Return a line without control characters, cut if it is long."""
    shown = CONTROLS.sub("", line.rstrip("\r").rpartition("\r")[2])
    return shown if len(shown) <= LINE_CHARACTERS else f"{shown[:LINE_CHARACTERS]} …"


class LogView:
    """Follows a log in a thread while the page is open."""

    def __init__(self, context: PageContext, open_log: Callable[[Platform], Iterator[bytes]]) -> None:
        self._context, self._open_log = context, open_log
        self._lines, self._lock = LogLines(), threading.Lock()
        self._stop = threading.Event()
        self._is_due, self._is_empty = False, True
        self.view = ui.log(max_lines=LINES).classes("log mono")
        self.view.props("role=log aria-label='Log' tabindex=0")
        self.note = ui.label("Waiting for the first line.").classes("muted small")
        self._loop = asyncio.get_running_loop()
        context.client.on_delete(self._stop.set)
        start_thread(self._follow, name="log-view")

    def _follow(self) -> None:
        ended = "The log has ended."
        try:
            for piece in self._open_log(self._context.session.platform):
                if self._stop.is_set():
                    return
                if piece:
                    with self._lock:
                        self._lines.add(piece)
                        is_due, self._is_due = self._is_due, True
                    if not is_due:
                        self._loop.call_soon_threadsafe(self._flush_soon)
        except Unauthenticated:
            return
        except (FalajError, RuntimeError) as error:  # RuntimeError: the client was closed
            ended = error.message if isinstance(error, FalajError) else "The connection was closed."
        with self._lock:
            self._lines.end()
        self._loop.call_soon_threadsafe(self._flush, ended)

    def _flush_soon(self) -> None:
        self._loop.call_later(GATHER_S, self._flush)

    def _flush(self, ended: str | None = None) -> None:
        with self._lock:
            lines, self._is_due = self._lines.take(), False
        if self._context.client.is_deleted or self._stop.is_set():
            return
        with self._context.client:
            for line in lines:
                self.view.push(line or " ")
            self._is_empty = self._is_empty and not lines
            if ended is not None:
                self.note.text = f"{ended} It has no lines." if self._is_empty else ended
                self.view.set_visibility(not self._is_empty)
            elif lines:
                self.note.text = "Following."
