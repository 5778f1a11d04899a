"""A run that is resumed, moved or retried records all of its interruptions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from agent_harness import agent_of
from falaj.control.jobs.agent import read_run_history
from falaj.records.tracking import MetricPoint
from falaj.records.training.jobs import Job
from falaj.training.runs import CONTINUES_RUN
from falaj.training.runtime.agent.agents import RESUME_PREFIX
from falaj.training.runtime.agent.protocol import LOSS_FORMAT
from falaj.training.runtime.fit import FitResult, fit
from falaj.training.runtime.reporting import report
from job_harness import NODE, JobHarness
from polling import eventually

MICRO_BATCHES = 2
ROWS = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))
Fit = Callable[..., FitResult | None]


class Killed(BaseException):
    """Interrupts a run as abruptly as one process allows."""


class InterruptedModel(nn.Module):
    """Interrupts its run at the `deadly` step of this process, after its last output."""

    def __init__(self, deadly: int, last_words: Callable[[], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self._left, self._last_words = (deadly - 1) * MICRO_BATCHES + 1, last_words

    def forward(self, rows: Tensor) -> Tensor:
        self._left -= 1
        if self._left == 0:
            self._last_words()
            raise Killed
        output: Tensor = self.layers(rows)
        return output


@pytest.fixture
def harness(light_harness: JobHarness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> JobHarness:
    """Two pools, and losses that are logged at once, so that there are some to compare."""
    monkeypatch.setattr(report, "SEND_INTERVAL_S", 0.0)
    monkeypatch.setenv("FALAJ_CACHE", str(tmp_path / "cache"))
    other = NODE.model_copy(update={"name": "there", "pool": "other"})
    monkeypatch.setattr(light_harness.machine, "nodes", lambda: (NODE, other))
    return light_harness


@pytest.fixture
def trained(harness: JobHarness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fit:
    def attempt(job: Job, *, dies_at: int = 0, kept: int = 0) -> FitResult | None:
        """Run the script; return None where it is interrupted at its step `deadly`, when step `kept` is stored."""

        def wait_for_checkpoint() -> None:
            eventually(
                lambda: max([each.step for each in harness.jobs.checkpoints(job.id)], default=0) == kept
            )

        with agent_of(harness, job, tmp_path / "attempt") as socket:
            monkeypatch.setenv("FALAJ_AGENT", str(socket))
            try:
                return fit(
                    InterruptedModel(dies_at, wait_for_checkpoint),
                    nn.functional.mse_loss,
                    (ROWS, ROWS.sum(1, keepdim=True)),
                    steps=20,
                    batch_size=8,
                    accumulate=MICRO_BATCHES,
                    checkpoint_every=4,
                    exact=True,
                    device="cpu",
                    tune="off",
                )
            except Killed:
                return None

    return attempt


def test_new_attempts_moves_and_retries_are_one_chain(harness: JobHarness, trained: Fit) -> None:
    job = harness.begin(harness.submit(retries=2))
    trained(job, dies_at=7, kept=4)  # six steps are logged
    harness.finish(job, "failed", reason="signal 9")
    harness.begin(job, 2)  # by itself
    trained(job, dies_at=6, kept=8)  # nine
    harness.jobs.move(job.id, to="other")
    harness.finish(job, "moved", 2)
    harness.begin(job, 3)
    trained(job, dies_at=2, kept=8)  # nine again
    harness.finish(job, "failed", 3)
    harness.begin(job, 4)
    trained(job, dies_at=3, kept=8)  # ten
    ended = harness.finish(job, "failed", 4)
    again = harness.jobs.retry(job.id)
    harness.begin(job, 5)

    result = trained(again)

    assert result is not None
    certificate = result.certificate
    assert certificate is not None
    points = [(each.step, each.reached, each.killed) for each in certificate.resumes]
    assert points == [(4, 6, True), (8, 9, True), (8, 9, True), (8, 10, True)]
    assert certificate.kill_points == certificate.resumes
    assert certificate.compared == 2 + 1 + 1 + 2
    assert (certificate.exact, certificate.largest_difference, certificate.steps) == (True, 0.0, 20)
    assert (ended.run, again.run != job.run) == (job.run, True)


def test_the_run_of_a_retry_names_the_run_that_it_continues(harness: JobHarness, trained: Fit) -> None:
    job = harness.begin(harness.submit(retries=1))
    trained(job, dies_at=7, kept=4)
    harness.finish(job, "interrupted")
    harness.begin(job, 2)
    trained(job, dies_at=2, kept=4)
    before = harness.platform.runs.show(job.run)
    harness.finish(job, "cancelled", 2)

    again = harness.jobs.retry(job.id)

    after = {each.key: each.value for each in harness.platform.runs.show(again.run).params}
    survived = {each.key: each.value for each in before.params if each.key.startswith(RESUME_PREFIX)}
    assert survived
    assert survived.items() <= after.items()
    assert after[CONTINUES_RUN] == job.run
    above = {node.id for node in harness.platform.lineage.graph(again.run) if node.depth < 0}
    assert {job.run, job.id} <= above


def test_a_job_retried_many_times_keeps_every_run(harness: JobHarness) -> None:
    job = harness.submit()
    for step in (5, 6, 7):
        harness.platform.runs.log_metrics(job.run, (MetricPoint(key="loss", value=step / 2, step=step),))
        harness.jobs.cancel(job.id)
        job = harness.jobs.retry(job.id)

    _, losses = read_run_history(harness.services.runs, job.run, after=5)

    assert list(LOSS_FORMAT.iter_unpack(losses)) == [(6, 3.0), (7, 3.5)]
