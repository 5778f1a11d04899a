"""The progress of a run without a platform: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from falaj.training.runtime.errors import InvalidTraining
from falaj.training.runtime.fit import fit
from falaj.training.runtime.reporting import progress, report
from falaj.training.runtime.reporting.progress import ProgressDisplay, duration

ROWS = torch.randn(64, 4)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def train(steps: int = 20, **changes: Any) -> None:
    options: dict[str, Any] = {"steps": steps, "batch_size": 8, "device": "cpu", "tune": "off", **changes}
    fit(nn.Linear(4, 4), nn.functional.mse_loss, (ROWS, ROWS), **options)


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(report, "SEND_INTERVAL_S", 0.0)
    return shown


def test_a_terminal_shows_a_bar_that_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)

    train()

    drawn = terminal.getvalue().split(progress.CLEAR)
    assert any("100% [########################] step 20/20  loss " in each for each in drawn)
    assert any(" 50% [############............] step 10/20" in each for each in drawn)
    assert "samples/s" in terminal.getvalue()
    assert drawn[-1] == ""


def test_a_run_in_a_folder_shows_the_bar_too_and_continues_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train(10, run=tmp_path)
    terminal = on_terminal(monkeypatch)

    train(20, run=tmp_path)

    assert "step 11/20" in terminal.getvalue()
    assert "step 10/20" not in terminal.getvalue()


def test_progress_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)

    train(progress=False)

    assert terminal.getvalue() == ""
    with pytest.raises(InvalidTraining, match="progress"):
        train(progress="yes")


def test_a_message_of_the_run_clears_the_bar_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    terminal = on_terminal(monkeypatch)

    class Bounded(nn.Linear):
        steps = 0

        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            self.steps += 1
            if self.steps > 5 and len(input) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(input)

    fit(Bounded(4, 4), nn.functional.mse_loss, (ROWS, ROWS), steps=8, batch_size=8, tune="off", device="cpu",
        run=tmp_path)  # fmt: skip

    assert f"{progress.CLEAR}step 6: out of memory" in terminal.getvalue()


def test_a_message_clears_the_bar() -> None:
    shown = Terminal()
    bar = ProgressDisplay(10, 0, stream=shown)
    bar.show(5, 0.5, batch_size=8)

    bar.around(lambda words: print(words, file=shown))("step 5: out of memory")

    assert shown.getvalue().endswith(f"{progress.CLEAR}step 5: out of memory\n")


def test_elsewhere_there_are_lines_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    file, now = io.StringIO(), [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = ProgressDisplay(2000, 0, stream=file)

    for second in range(1, 31):
        now[0] = float(second)
        lines.show(50 * second, 0.25, batch_size=8)

    assert file.getvalue().splitlines() == [
        "step 500/2,000  loss 0.25  400 samples/s  0:30 left",
        "step 1,000/2,000  loss 0.25  400 samples/s  0:20 left",
        "step 1,500/2,000  loss 0.25  400 samples/s  0:10 left",
    ]


def test_a_short_run_without_a_terminal_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    train()

    assert capsys.readouterr() == ("", "")


def test_a_closed_stream_does_not_end_the_training() -> None:
    gone = Terminal()
    bar = ProgressDisplay(10, 0, stream=gone)
    gone.close()

    bar.show(5, 0.5, batch_size=8)
    bar.clear()


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61, "1:01"), (3725, "1:02:05")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


SCRIPT = """
import time, torch
from falaj.training.runtime.fit import fit
rows = torch.randn(64, 4)
pause = lambda step, loss: time.sleep(0.05)
fit(torch.nn.Linear(4, 4), torch.nn.functional.mse_loss, (rows, rows), steps=40, batch_size=8, device="cpu",
    tune="off", callbacks=[pause])
"""


@pytest.mark.slow
def test_a_real_terminal_shows_the_bar() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # the other side is closed
        pass
    assert process.wait() == 0

    assert b"/40  loss" in shown
    assert shown.endswith(progress.CLEAR.encode())
