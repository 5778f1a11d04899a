"""Callbacks are called for every step, evaluation and checkpoint, can end a run, and do not damage it on failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import falaj as fj
from falaj.training.runtime.agent.agents import FolderAgent
from falaj.training.runtime.callbacks import STOP
from falaj.training.runtime.errors import CallbackFailed, InvalidTraining
from falaj.training.runtime.fit import FitResult, fit
from falaj.training.runtime.reporting import report as reporting


class EventRecorder:
    """Records all calls."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []

    def on_start(self, step: int, total: int) -> None:
        self.entries.append(("start", step, total))

    def on_step(self, step: int, loss: float) -> None:
        self.entries.append(("step", step, loss))

    def on_evaluation(self, step: int, score: float) -> None:
        self.entries.append(("evaluation", step, score))

    def on_checkpoint(self, step: int) -> None:
        self.entries.append(("checkpoint", step))

    def on_end(self, result: FitResult) -> None:
        self.entries.append(("end", result))


def rows() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))
    return inputs, inputs.sum(1, keepdim=True)


def train(*callbacks: Any, model: nn.Module | None = None, **changes: Any) -> FitResult:
    torch.manual_seed(0)
    options: dict[str, Any] = {"batch_size": 8, "steps": 6, "device": "cpu", **changes}
    return fit(model or nn.Linear(4, 1), nn.functional.mse_loss, rows(), callbacks=list(callbacks), **options)


def test_a_callback_receives_every_event_in_order(tmp_path: Path) -> None:
    recorder = EventRecorder()

    result = train(recorder, evaluate=lambda _: 0.5, evaluate_every=3, checkpoint_every=3, run=tmp_path)

    steps = [("step", number, loss) for number, loss in enumerate(result.losses, start=1)]
    looked = [[("evaluation", number, 0.5), ("checkpoint", number)] for number in (3, 6)]
    assert recorder.entries == [
        ("start", 0, 6),
        *steps[:3],
        *looked[0],
        *steps[3:],
        *looked[1],
        ("end", result),
    ]


def test_a_function_is_called_after_each_step_with_the_model_as_the_step_left_it() -> None:
    model = nn.Linear(4, 1)
    seen: list[tuple[int, float, float]] = []

    result = train(lambda step, loss: seen.append((step, loss, float(model.bias.detach()))), model=model)

    assert [(step, loss) for step, loss, _ in seen] == list(enumerate(result.losses, start=1))
    assert seen[-1][2] == float(model.bias.detach())
    assert len({bias for *_, bias in seen}) == 6


def test_losses_read_together_are_reported_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where reading each loss would stall."""
    made = reporting.TrainingReport.__init__

    def windowed(self: Any, *given: Any, **named: Any) -> None:
        made(self, *given, **named)
        self._width = 4

    monkeypatch.setattr(reporting.TrainingReport, "__init__", windowed)
    recorder = EventRecorder()

    result = train(recorder, steps=10, evaluate=lambda _: 0.5, evaluate_every=6)

    assert [each[1:] for each in recorder.entries if each[0] == "step"] == list(
        enumerate(result.losses, start=1)
    )
    assert [each[1] for each in recorder.entries][:8] == [0, 1, 2, 3, 4, 5, 6, 6]


def test_a_resumed_run_reports_its_own_steps(tmp_path: Path) -> None:
    train(run=tmp_path, steps=4)
    recorder = EventRecorder()

    train(recorder, run=tmp_path)

    assert [each[:2] for each in recorder.entries[:-1]] == [
        ("start", 4),
        ("step", 5),
        ("step", 6),
        ("checkpoint", 6),
    ]


def test_a_run_without_a_folder_reports_no_checkpoints() -> None:
    recorder = EventRecorder()

    train(recorder)

    assert "checkpoint" not in {each[0] for each in recorder.entries}


def test_a_callback_may_end_the_run_and_it_is_saved(tmp_path: Path) -> None:
    stopped = train(lambda step, _: fj.STOP if step == 3 else None, run=tmp_path)

    assert (stopped.step, stopped.stopped) == (3, "asked")
    assert train(run=tmp_path).resumed_from == 3
    assert fj.STOP is STOP


@pytest.mark.parametrize("moment", ["on_start", "on_step", "on_evaluation", "on_checkpoint"])
def test_a_run_ended_by_a_callback_is_complete(
    tmp_path: Path, moment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Ender:
        pass

    setattr(Ender, moment, lambda self, step, *_: STOP if step in (0, 4) else None)
    options: dict[str, Any] = {"evaluate": lambda _: 1.0, "evaluate_every": 2, "checkpoint_every": 2}
    last = 0 if moment == "on_start" else 4
    assert train(Ender(), run=tmp_path, **options).step == last

    again = train(run=tmp_path, **options)

    assert (again.step, again.resumed_from, again.stopped, again.losses) == (last, last, "asked", [])
    assert (
        f"a callback ended this run at step {last} of 6 in an earlier call: nothing is left to do. To continue, "
        "request more than 6 steps" in capsys.readouterr().err
    )
    assert train(run=tmp_path, steps=8, **options).step == 8
    assert train(run=tmp_path, steps=10, **options).step == 10


def test_a_run_killed_after_its_callback_ended_it_is_complete(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    class Ender(EventRecorder):
        def on_step(self, step: int, loss: float) -> Any:
            return STOP if step == 3 else None

        def on_end(self, result: FitResult) -> None:
            raise Killed

    with pytest.raises(Killed):
        train(Ender(), run=tmp_path)

    assert train(run=tmp_path).step == 3


@pytest.mark.slow
def test_a_run_ended_by_a_callback_of_one_process_ends_for_all(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ended_fit.py")), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    ended, again = json.loads(ran.stdout.splitlines()[-1])
    assert ended == [[4, 0, "asked"]] * 2
    assert again == [[4, 4, "asked"]] * 2


@pytest.mark.parametrize("how", ["a signal", "its agent"])
def test_a_preempted_run_is_not_complete(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "SEND_INTERVAL_S", 0.0)
    monkeypatch.setattr(FolderAgent, "heartbeat", lambda _: how == "a signal")
    previous = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ended: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", ended.append)
    try:
        stopped = train(
            lambda step, _: os.kill(os.getpid(), signal.SIGTERM) if how == "a signal" and step == 3 else None,
            run=tmp_path,
        )
    finally:
        signal.signal(signal.SIGTERM, previous)
    monkeypatch.undo()

    assert stopped.stopped == "asked"
    assert stopped.step < 6
    assert train(run=tmp_path).step == 6


@pytest.mark.parametrize("moment", ["on_start", "on_step", "on_evaluation", "on_checkpoint", "on_end"])
def test_a_failing_callback_ends_the_run_after_it_was_saved(tmp_path: Path, moment: str) -> None:
    class Broken:
        pass

    def fail(*_: Any) -> None:
        raise ValueError("no disk for pictures")

    setattr(Broken, moment, fail)
    after = EventRecorder()

    with pytest.raises(CallbackFailed) as failure:
        train(
            Broken(),
            after,
            run=tmp_path,
            evaluate=lambda _: 1.0,
            evaluate_every=2,
            checkpoint_every=2,
            steps=4,
        )

    last = {"on_start": 0, "on_step": 1, "on_evaluation": 2, "on_checkpoint": 2, "on_end": 4}[moment]
    assert f"Broken.{moment} failed" in str(failure.value)
    assert f"ValueError: no disk for pictures; the run ended, its last checkpoint: of step {last}" in str(
        failure.value
    )
    assert isinstance(failure.value.__cause__, ValueError)
    assert "end" not in {each[0] for each in after.entries}
    assert train(run=tmp_path).resumed_from == last


@pytest.mark.parametrize(
    ("given", "where"),
    [
        (print, "callbacks"),
        ([3], "callbacks[0]"),
        ([print, type("Typo", (), {"on_stepp": print})()], "callbacks[1]"),
    ],
    ids=["one", "no callback", "unknown moment"],
)
def test_an_invalid_callback_is_refused_with_the_other_faults(given: Any, where: str) -> None:
    with pytest.raises(InvalidTraining) as refusal:
        fit(nn.Linear(4, 1), nn.functional.mse_loss, rows(), steps=1, callbacks=given, batch_size=0)

    assert [fault.where for fault in refusal.value.faults] == ["batch_size", where]
