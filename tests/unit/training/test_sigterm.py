"""SIGTERM during training: the run is saved at its current step, and resumes exactly from there."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from falaj.training.runtime.agent.agents import FolderAgent
from falaj.training.runtime.fit import sigterm_stops
from polling import PATIENCE_S, eventually

STEPS = 400
SCRIPT = f"""
import sys, time, torch
import falaj as fj

torch.set_num_threads(1)
torch.manual_seed(3)
rows = torch.randn(64, 4)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

def loss(out, target):
    time.sleep(float(sys.argv[2]))
    return torch.nn.functional.mse_loss(out, target)

result = fj.fit(model, loss, (rows, rows.sum(1, keepdim=True)), steps={STEPS}, batch_size=8, seed=1,
                device="cpu", run=sys.argv[1])
print(result.resumed_from, result.stopped, result.losses[-1].hex())
"""


def start(run: Path, *, pause_s: float) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", SCRIPT, str(run), str(pause_s)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> list[str]:
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    return out.split()


@pytest.mark.slow
def test_a_terminated_fit_saves_ends_and_resumes_exactly(tmp_path: Path) -> None:
    undisturbed = ended(start(tmp_path / "whole", pause_s=0))
    process = start(tmp_path / "run", pause_s=0.02)
    eventually(lambda: (tmp_path / "run" / "progress.json").exists())

    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=PATIENCE_S)

    assert (process.returncode, out) == (-signal.SIGTERM, "")
    agent = FolderAgent(tmp_path / "run")
    saved = agent.checkpoints().steps()[0]
    agent.close()
    assert 0 < saved < STEPS
    again = ended(start(tmp_path / "run", pause_s=0))
    assert again == [str(saved), "done", undisturbed[-1]]


def test_a_signal_handler_of_the_user_is_kept() -> None:
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("theirs"))
    try:
        with sigterm_stops(lambda: heard.append("ours")):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)

    assert heard == ["theirs"]


def test_the_previous_sigterm_handler_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)

    with sigterm_stops(lambda: pytest.fail("no signal was sent")):
        pass

    assert signal.getsignal(signal.SIGTERM) is before
