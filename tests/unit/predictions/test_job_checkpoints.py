"""The progress of a batch prediction in checkpoints: increments, restored exactly, replaced where they are useless."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from batch_runs import BatchRunner, Stopped, customers, scores
from falaj.assembly.prediction import job_checkpoints
from falaj.assembly.prediction.job_checkpoints import JobCheckpoints
from falaj.records.control.predictions import PredictionProgress, PredictionSummary
from falaj.serving.runtime.batch_prediction.run import RunStopped
from falaj.training.runtime.checkpointing.storage.folder import CheckpointFolder

pytestmark = pytest.mark.usefixtures("small_parts")

ROWS = 120_500


class JobAttempts:
    """Attempts at a job, each in a folder of its own with a copy of the input of its own; the checkpoints remain."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        (folder / "checkpoints").mkdir()
        self.store = CheckpointFolder(folder / "checkpoints")

    def __call__(
        self, rows: pa.Table, *, stop_at: int | None = None, model: str = "churn@1"
    ) -> PredictionSummary:
        """Predict; at `stop_at` rows the attempt is asked to stop."""
        self.number += 1
        batch = BatchRunner(self.folder / str(self.number))
        source = batch.write(rows, row_group_size=9_000)
        batch.partial.mkdir()
        self.checkpoints = JobCheckpoints(self.store, batch.partial)
        self.resumed = self.checkpoints.restore()
        report = self._stopping(stop_at)
        return batch(source, report=report, keeper=self.checkpoints, is_staged=True, model=model)

    def _stopping(self, at: int | None) -> Callable[[PredictionProgress], None]:
        def report(far: PredictionProgress) -> None:
            if at is not None and far.rows >= at:
                self.checkpoints._is_stopping = True

        return report

    def predicted(self) -> pa.Table:
        return BatchRunner(self.folder / str(self.number)).predicted()


@pytest.fixture
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobAttempts:
    monkeypatch.setattr(job_checkpoints, "SAVE_S", 0.0)
    monkeypatch.setattr(job_checkpoints, "SAVE_SHARE", 0)
    return JobAttempts(tmp_path)


def require_all(made: pa.Table, rows: pa.Table) -> None:
    assert np.array_equal(made["id"].to_numpy(), rows["id"].to_numpy())
    assert np.array_equal(made["score"].to_numpy(), scores(rows))


def test_attempts_that_are_stopped_go_on_where_they_stopped(attempts: JobAttempts) -> None:
    rows = customers(ROWS)
    resumed = []

    for stop_at in (5_000, 50_000, 110_000):
        with pytest.raises(RunStopped):
            attempts(rows, stop_at=stop_at)
        resumed.append(attempts.resumed)
    done = attempts(rows)

    assert resumed[0] == 0
    assert 5_000 <= resumed[1] < 50_000 <= resumed[2] < 110_000 <= done.resumed < ROWS
    require_all(attempts.predicted(), rows)


def test_increments_together_are_no_larger_than_the_output(attempts: JobAttempts) -> None:
    rows = customers(ROWS)
    with pytest.raises(RunStopped):
        attempts(rows, stop_at=ROWS - 2_000)

    stored = [path for path in (attempts.folder / "checkpoints").rglob("*") if path.is_file()]
    written = (attempts.folder / "1" / "partial" / "data").stat().st_size

    assert 20 < len(attempts.store.steps()) <= job_checkpoints.MOST_SAVES + 1
    assert (
        sum(path.stat().st_size for path in stored if "manifest" not in path.name) < 1.1 * written + 100_000
    )


def test_many_increments_are_replaced_by_one(attempts: JobAttempts, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = customers(ROWS)
    monkeypatch.setattr(job_checkpoints, "MAX_KEPT", 8)

    with pytest.raises(RunStopped):
        attempts(rows, stop_at=100_000)
    kept = len(attempts.store.steps())
    done = attempts(rows)

    assert kept <= 8
    assert done.resumed >= 100_000
    require_all(attempts.predicted(), rows)


def test_rows_that_were_appended_since_do_not_matter(attempts: JobAttempts) -> None:
    """A view is read as it is when an attempt starts."""
    with pytest.raises(RunStopped):
        attempts(customers(ROWS), stop_at=50_000)

    done = attempts(customers(ROWS + 3_000))

    assert done.resumed >= 50_000
    require_all(attempts.predicted(), customers(ROWS + 3_000))


def test_other_rows_or_another_model_begin_anew(
    attempts: JobAttempts, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunStopped):
        attempts(customers(ROWS), stop_at=50_000)
    with pytest.raises(RunStopped):
        attempts(customers(ROWS, first=1), stop_at=20_000)
    said = capsys.readouterr().err
    done = attempts(customers(ROWS, first=1))

    assert "row group 0 has changed since: it begins anew" in said
    assert 20_000 <= done.resumed < 50_000
    require_all(attempts.predicted(), customers(ROWS, first=1))


@pytest.mark.parametrize("is_manifest", [True, False])
def test_a_damaged_increment_and_all_behind_it_are_predicted_again(
    attempts: JobAttempts, is_manifest: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = customers(ROWS)
    with pytest.raises(RunStopped):
        attempts(rows, stop_at=60_000)
    third = sorted(attempts.store.steps())[2]
    before = sorted(attempts.store.steps())[1]
    folder = next((attempts.folder / "checkpoints").glob(f"*{third}"))
    damaged = next(path for path in folder.iterdir() if ("manifest" in path.name) == is_manifest)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 0xFF
    damaged.chmod(0o600)
    damaged.write_bytes(content)

    with pytest.raises(RunStopped):
        attempts(rows, stop_at=40_000)
    said = capsys.readouterr().err
    first = attempts.resumed
    done = attempts(rows)

    assert f"the checkpoint of row {third} is not used" in said
    assert first == before
    assert done.resumed >= 40_000
    require_all(attempts.predicted(), rows)


def test_a_failed_save_does_not_end_the_prediction(
    attempts: JobAttempts, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(attempts.folder / "checkpoints")
    (attempts.folder / "checkpoints").touch()
    attempts.store.steps = list  # type: ignore[method-assign]

    attempts(customers(ROWS))

    assert "the progress could not be saved" in capsys.readouterr().err
    require_all(attempts.predicted(), customers(ROWS))


def test_a_finished_output_leaves_nothing_behind(attempts: JobAttempts) -> None:
    attempts(customers(ROWS))

    attempts.checkpoints.finish()

    stored = [path for path in (attempts.folder / "checkpoints").rglob("*") if path.is_file()]
    assert len(attempts.store.steps()) == 1
    assert sum(path.stat().st_size for path in stored) < 2_000
    assert JobCheckpoints(attempts.store, attempts.folder).restore() == 0


def test_an_attempt_that_fails_keeps_what_it_has_done(attempts: JobAttempts) -> None:
    class Failing(JobAttempts):
        def _stopping(self, at: int | None) -> Callable[[PredictionProgress], None]:
            def report(far: PredictionProgress) -> None:
                if far.rows >= 30_000:
                    raise Stopped

            return report

    failing = Failing.__new__(Failing)
    failing.__dict__ = attempts.__dict__
    with pytest.raises(Stopped):
        failing(customers(ROWS))

    assert attempts(customers(ROWS)).resumed >= 30_000
