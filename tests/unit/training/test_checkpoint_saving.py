"""Background checkpoints hold the state of their step; failures are reported, and the best one is kept."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from falaj.training.runtime.agent.agents import FolderAgent
from falaj.training.runtime.checkpointing import saver
from falaj.training.runtime.checkpointing.checkpointer import Checkpointer, PendingCheckpoint
from falaj.training.runtime.checkpointing.state import CheckpointState
from falaj.training.runtime.checkpointing.storage import folder as folders
from falaj.training.runtime.checkpointing.storage.folder import CheckpointFolder
from falaj.training.runtime.checkpointing.storage.manifest import decode_manifest
from falaj.training.runtime.checkpointing.storage.staging import Staging
from falaj.training.runtime.checkpointing.storage.store import Bytes, Retention, SaveId
from falaj.training.runtime.errors import CheckpointFailed, InvalidTraining
from falaj.training.runtime.fit import FitResult, fit
from falaj.training.runtime.parallel.process_group import ProcessGroup
from polling import A_MOMENT_S

STEPS = 12


def train(run: Path | FolderAgent | None, *, seed: int = 0, **changes: Any) -> FitResult:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = {"batch_size": 8, "steps": STEPS, "checkpoint_every": 4, **changes}
    data = rows, rows.sum(1, keepdim=True)
    return fit(model, nn.functional.mse_loss, data, device="cpu", tune="off", run=run, **options)


def steps_in(run: Path) -> list[int]:
    return CheckpointFolder(run / "checkpoints").steps()


# ------------------------------------------------------------------------------------------- staging


def test_a_step_waits_for_copies_of_what_it_would_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies are delayed until the loop waits for them, after the forward and backward pass."""
    waiting = threading.Event()
    real_finish, real_wait = Staging.finish, Staging._wait_for_thread

    def finish(self: Staging) -> None:
        waiting.wait(A_MOMENT_S)  # nothing waits for the last one
        real_finish(self)

    def wait(self: Staging) -> None:
        waiting.set()
        real_wait(self)
        waiting.clear()

    straight = train(None)
    monkeypatch.setattr(Staging, "finish", finish)
    monkeypatch.setattr(Staging, "_wait_for_thread", wait)

    train(tmp_path, steps=9)
    (tmp_path / "checkpoints" / "step-0000000009" / "manifest.json").unlink()
    again = train(tmp_path, seed=1)

    assert again.resumed_from == 8
    assert again.losses == straight.losses[8:]


def test_a_callback_that_changes_the_model_waits_for_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = threading.Event()
    real, model = Staging.finish, nn.Linear(4, 1)
    before = model.weight.detach().clone()

    class Warmer:
        def on_start(self, step: int, total: int) -> None:
            nn.init.ones_(model.weight)
            changed.set()

    def finish(self: Staging) -> None:
        changed.wait(A_MOMENT_S)
        real(self)

    monkeypatch.setattr(Staging, "finish", finish)

    fit(
        model,
        no_loss,
        torch.ones(32, 4),
        device="cpu",
        tune="off",
        run=tmp_path,
        steps=1,
        callbacks=[Warmer()],
    )

    store = CheckpointFolder(tmp_path / "checkpoints")
    (piece,) = (
        each
        for each in decode_manifest(store.load_manifest(0), step=0).pieces
        if each.tensor == "model/weight"
    )
    kept = store.load_part(0, piece.part, offset=piece.at, length=piece.size_bytes)
    assert torch.equal(torch.frombuffer(kept, dtype=torch.float32).reshape(1, 4), before)


def no_loss(output: Tensor, _: Tensor) -> Tensor:
    return output.sum()


def test_a_failed_copy_is_reported_to_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is sent with the plan, for which the others wait."""

    def finish(_: Staging) -> None:
        raise RuntimeError("no such memory")

    monkeypatch.setattr(Staging, "finish", finish)
    checkpointer = Checkpointer(CheckpointFolder(tmp_path), ProcessGroup())

    begun = checkpointer.save(CheckpointState({}, {}, {}, frozenset()), step=1, run={}, retention=Retention())

    failure = begun.written.exception()
    assert isinstance(failure, CheckpointFailed)
    assert failure.message == "the state could not be copied: no such memory"
    checkpointer.close()


def test_saving_does_not_change_losses(tmp_path: Path) -> None:
    assert train(tmp_path, checkpoint_every=1).losses == train(None).losses


# ------------------------------------------------------------------------------------------ failures


Refuses = Callable[[SaveId], bool]


def fill_disk(monkeypatch: pytest.MonkeyPatch, when: Refuses) -> None:
    """Direct parts to a full device when `when` returns true."""
    real, names = CheckpointFolder.save_part, folders.part_name

    def save_part(self: CheckpointFolder, mark: SaveId, number: int, pieces: Sequence[Bytes]) -> None:
        monkeypatch.setattr(folders, "part_name", (lambda _: "/dev/full") if when(mark) else names)
        try:
            real(self, mark, number, pieces)
        finally:
            monkeypatch.setattr(folders, "part_name", names)

    monkeypatch.setattr(CheckpointFolder, "save_part", save_part)


def test_a_failed_save_is_reported_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_disk(monkeypatch, lambda mark: mark.step == 4)

    result = train(tmp_path)

    output = capsys.readouterr().err
    assert "the checkpoint of step 4 could not be saved: No space left on device" in output
    assert "the last good one: of step 0. Training continues" in output
    assert result.step == STEPS
    assert steps_in(tmp_path) == [12, 8, 0]


def test_a_disk_that_stays_full_ends_the_run_and_names_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, lambda mark: mark.step > 0)

    with pytest.raises(CheckpointFailed) as refusal:
        train(tmp_path)

    words = str(refusal.value)
    assert "step 8 could not be saved: No space left on device" in words
    assert "the last good one: of step 0" in words
    assert isinstance(refusal.value.__cause__, OSError)
    assert refusal.value.__cause__.errno == errno.ENOSPC
    monkeypatch.undo()
    assert train(tmp_path, seed=1).losses == train(None).losses


def test_the_last_save_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def once(mark: SaveId) -> bool:
        tried.append(mark.step)
        return tried.count(STEPS) == 1

    fill_disk(monkeypatch, once)

    train(tmp_path)

    assert tried == [0, 4, 8, 12, 12]
    assert steps_in(tmp_path) == [12, 8, 4]


def test_a_run_that_cannot_save_its_first_checkpoint_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, lambda _: True)

    with pytest.raises(CheckpointFailed, match=r"step 0 could not be saved: .* last good one: none"):
        train(tmp_path)


def test_missing_memory_for_a_copy_is_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = torch.empty

    def empty(*args: Any, **options: Any) -> Tensor:
        if options.get("dtype") is torch.uint8 and args[0]:
            monkeypatch.setattr(torch, "empty", real)
            raise RuntimeError("can't allocate memory")
        return real(*args, **options)

    train(tmp_path, steps=2)
    monkeypatch.setattr(torch, "empty", empty)
    train(tmp_path)

    assert (
        "could not be saved: the state could not be copied: can't allocate memory" in capsys.readouterr().err
    )
    assert steps_in(tmp_path)[0] == STEPS


# ----------------------------------------------------------------------------------------- retention


def wait_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no checkpoint be pending when the next one is due."""
    real = Checkpointer.save

    def save(self: Checkpointer, *args: Any, **options: Any) -> PendingCheckpoint:
        begun = real(self, *args, **options)
        begun.written.exception()
        return begun

    monkeypatch.setattr(Checkpointer, "save", save)
    monkeypatch.setattr(saver, "BEST_TIME_SHARE", 1.0)


def test_the_best_checkpoint_is_saved_at_once_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_each(monkeypatch)
    scores = iter([5.0, 1.0, 3.0, 2.0, 4.0, 6.0])

    result = train(
        tmp_path,
        evaluate=lambda _: next(scores),
        evaluate_every=2,
        checkpoint_every=3,
        checkpoint_keep=2,
    )

    assert result.best is not None
    assert result.best.step == 4
    assert steps_in(tmp_path) == [12, 9, 4]


def test_the_best_checkpoint_stays_when_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_each(monkeypatch)
    scores = iter([5.0, 1.0, 3.0, 2.0, 4.0, 6.0])
    options: dict[str, Any] = {"evaluate": lambda _: next(scores), "evaluate_every": 2, "checkpoint_keep": 1}

    for steps in (6, 9, STEPS):
        train(tmp_path, steps=steps, **options)

    assert steps_in(tmp_path) == [12, 4]


def test_a_better_checkpoint_that_failed_does_not_replace_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_each(monkeypatch)
    fill_disk(monkeypatch, lambda mark: mark.step == 6)
    scores = iter([5.0, 1.0, 0.5, 2.0, 4.0, 6.0])

    train(
        tmp_path,
        evaluate=lambda _: next(scores),
        evaluate_every=2,
        checkpoint_every=3,
        checkpoint_keep=2,
    )

    assert steps_in(tmp_path) == [12, 9, 4]


@pytest.mark.parametrize("keep", [0, 101, True, 2.5])
def test_an_invalid_count_is_refused(keep: Any) -> None:
    with pytest.raises(InvalidTraining, match="checkpoint_keep"):
        train(None, checkpoint_keep=keep)
