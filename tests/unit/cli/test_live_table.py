"""Tables that are shown until they are ended, on a terminal of the test: keys, sizes, and what stays behind."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import struct
import sys
import termios
from collections.abc import Callable
from contextlib import suppress

import pytest
from rich.console import Console

from falaj.apps.cli.output.live_table import Screen, paint
from polling import PATIENCE_S

SCRIPT = """
import sys
from datetime import timedelta
from falaj.apps.cli.output.live_table import Screen, show_live
from falaj.apps.cli.session import Session

polls = iter(range(1000))

def screen(number):
    return Screen([f"poll {number}"], ["endpoint", "p50 ms"], [["a" * 60, "0.5"]], shrinking=("endpoint",))

ended = show_live(Session(None, None, False), lambda: next(polls), screen, once=False, every=timedelta(hours=1))
print("ended", ended)
"""


class Terminal:
    """A program on a pseudo terminal."""

    def __init__(self) -> None:
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.execve(
                sys.executable, [sys.executable, "-c", SCRIPT], dict(os.environ)
            )  # without what readline set
        self.resize(80, 24)
        self.before = termios.tcgetattr(self.master)
        self._seen = ""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def until(self, wanted: Callable[[str], bool]) -> str:
        """Return what was shown since the last call, once it is as wanted."""
        with suppress(OSError):  # it has ended
            while not wanted(self._seen) and select.select([self.master], [], [], PATIENCE_S)[0]:
                self._seen += os.read(self.master, 65536).decode(errors="replace")
        found, self._seen = self._seen, ""
        assert wanted(found), found
        return found

    def close(self) -> int:
        """Return the exit status of the program."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.master)
        return os.waitstatus_to_exitcode(status)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("LINES", raising=False)
    return Terminal()


@pytest.mark.parametrize("keys", ["q", "\x03"])
def test_q_and_ctrl_c_end_it_and_leave_the_terminal_as_it_was(terminal: Terminal, keys: str) -> None:
    terminal.until(lambda text: "poll 0" in text and "q to quit" in text.partition("poll 0")[2])

    terminal.press(keys)
    terminal.until(lambda text: "ended 0" in text)

    after = termios.tcgetattr(terminal.master)
    assert after[3] & termios.ECHO
    assert after[3] & termios.ICANON
    assert terminal.close() == 0


def test_a_larger_terminal_is_filled_and_space_refreshes_at_once(terminal: Terminal) -> None:
    narrow = terminal.until(lambda text: "poll 0" in text and "0.5" in text.partition("poll 0")[2])
    terminal.resize(50, 24)
    cut = terminal.until(lambda text: "…" in text and "0.5" in text.partition("…")[2])

    terminal.press(" ")
    again = terminal.until(lambda text: "poll 1" in text)
    terminal.press("q")
    terminal.until(lambda text: "ended" in text)

    assert "a" * 60 in narrow
    assert "a" * 60 not in cut
    assert "poll 0" not in again.rpartition("poll 1")[2]
    assert terminal.close() == 0


@pytest.mark.parametrize(("columns", "shown"), [(80, 3), (40, 3), (20, 2)])
def test_long_cells_are_cut_before_columns_are_left_out(
    monkeypatch: pytest.MonkeyPatch, columns: int, shown: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "24")
    screen = Screen(
        ["a line above"], ["endpoint", "rate", "errors"], [["e" * 50, "1.5", "0"]], shrinking=("endpoint",)
    )
    console = Console(width=columns, height=24, file=io.StringIO())

    console.print(paint(screen, "q to quit"))

    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= columns for line in text.splitlines())
    assert [name in text for name in screen.headings] == [True] * shown + [False] * (3 - shown)
    assert ("…" in text) == (columns < 80)
