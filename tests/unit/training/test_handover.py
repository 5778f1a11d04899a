"""Jobs that are handed over to Kueue: queued until their pods run, and charged from then on."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from falaj.control.jobs.reconciler import JobReconciler
from falaj.errors import Conflict
from falaj.governance.operations.caller import acting_as, on_terms
from falaj.ports.launcher import AttemptState, Launch
from falaj.records.scheduling.snapshot import Gpu
from falaj.records.training.jobs import Job, JobState
from falaj.training import store
from job_harness import DONE, GPU_NODE, STOPPED, JobHarness
from polling import eventually

WAITS = AttemptState("starting", reason="Kueue waits for quota: 1 more needed")
GPUS = tuple(Gpu(id=f"here/gpu-{n}", model="H200", memory_bytes=1 << 34) for n in range(2))


@pytest.fixture
def harness(light_harness: JobHarness) -> JobHarness:
    return kueue_harness(light_harness)


def kueue_harness(harness: JobHarness, *, limit: int = 2) -> JobHarness:
    """Return the harness with a cluster in which Kueue decides, and admits nothing by itself."""
    harness.machine.node = GPU_NODE.model_copy(update={"gpus": GPUS})
    harness.launcher.program = lambda _: WAITS
    harness.host = replace(harness.host, waiting_limit=limit)
    harness.jobs._waiting_limit = limit
    return harness


def waiting(harness: JobHarness, **spec: object) -> tuple[Job, JobReconciler]:
    """Return a job that waits in Kueue."""
    job, reconciler = harness.submit(**spec), harness.reconciler()
    reconciler.tick()
    eventually(lambda: harness.jobs.show(job.id).reason == WAITS.reason)
    return job, reconciler


def admitted(harness: JobHarness, job: Job, reconciler: JobReconciler, attempt: int = 1) -> None:
    """Let the pods of a job run."""
    state = AttemptState("running", hosts=("here",), started_at=harness.platform.clock())
    harness.launcher.known[f"{job.id}/{attempt}"] = state
    eventually(lambda: harness.jobs.show(job.id).state is JobState.RUNNING)
    reconciler.tick()


def stopped(harness: JobHarness, job: Job, reconciler: JobReconciler) -> None:
    """Let the first attempt end once it is told to."""

    def is_told() -> bool:
        reconciler.tick()
        return f"{job.id}/1" in harness.launcher.stopped

    eventually(is_told)
    harness.launcher.known[f"{job.id}/1"] = replace(STOPPED, stopped=True)


def ends(harness: JobHarness, job: Job, reconciler: JobReconciler) -> Job:
    def ended() -> Job | None:
        reconciler.tick()
        now = harness.jobs.show(job.id)
        return now if now.state.ended else None

    return eventually(ended)


@pytest.mark.slow
def test_a_job_is_queued_until_its_pods_run_and_is_charged_from_then_on(harness: JobHarness) -> None:
    seen: list[Launch] = []
    since = harness.platform.clock()
    harness.launcher.program = lambda launch: seen.append(launch) or WAITS  # type: ignore[func-returns-value]
    job, reconciler = waiting(harness, gpus=1, priority=1000)

    shown = harness.jobs.show(job.id)
    assert (shown.state, shown.node, shown.started_at) == (JobState.QUEUED, None, None)
    assert harness.jobs.explain(job.id).words == WAITS.reason
    assert [each.id for each in harness.jobs.list(state=JobState.QUEUED).items] == [job.id]
    with harness.platform.database.read() as tx:
        assert store.unfinished_in_queues(tx) == {"default": (0, 1)}
    (launch,) = seen
    assert (launch.hosts, len(launch.gpus)) == ((), 1)
    assert launch.labels == {"name": "fitting", "queue": "default", "workspace": "default"}
    assert launch.open_placement is not None
    assert launch.open_placement.priority == 1000

    harness.platform.clock.advance(timedelta(hours=5))
    admitted(harness, job, reconciler)
    harness.platform.clock.advance(timedelta(hours=2))
    harness.launcher.known[f"{job.id}/1"] = replace(DONE, hosts=("here",))

    ended = ends(harness, job, reconciler)
    assert (ended.state, ended.node) == (JobState.DONE, "here")
    row = harness.platform.usage.show(since=since).total
    assert row.gpu_hours == pytest.approx(2, abs=0.01)


@pytest.mark.slow
def test_the_gpus_of_its_node_are_counted_once(harness: JobHarness) -> None:
    first, reconciler = waiting(harness, gpus=1)
    second, _ = harness.submit(gpus=1), reconciler.tick()
    eventually(lambda: harness.jobs.show(second.id).reason == WAITS.reason)

    admitted(harness, first, reconciler)
    admitted(harness, second, reconciler)

    with harness.platform.database.read() as tx:
        assert store.held_gpus(tx) == {"here/gpu-0", "here/gpu-1"}
    assert harness.jobs.explain(first.id).words.startswith("runs on here")
    reconciler.stop()


@pytest.mark.slow
def test_a_waiting_job_is_cancelled_without_having_run(harness: JobHarness) -> None:
    job, reconciler = waiting(harness)

    assert harness.jobs.cancel(job.id).cancelling
    harness.launcher.known[f"{job.id}/1"] = replace(STOPPED, stopped=True)

    assert ends(harness, job, reconciler).state is JobState.CANCELLED
    assert harness.platform.usage.show().total.attempts == 0


@pytest.mark.slow
def test_a_waiting_job_that_is_moved_is_handed_over_anew_with_its_new_request(harness: JobHarness) -> None:
    job, reconciler = waiting(harness, gpus=1)

    harness.jobs.move(job.id, to="gpu", gpus=2)
    stopped(harness, job, reconciler)

    def again() -> bool:
        reconciler.tick()
        return f"{job.id}/2" in harness.launcher.known

    eventually(again)
    with harness.platform.database.read() as tx:
        row = store.job_row(tx, job.id)
    assert row.request is not None
    assert (row.request.each.gpus, row.handed_over, row.failures) == (2, True, 0)
    reconciler.stop()


def test_a_long_queue_has_a_bounded_number_of_attempts(harness: JobHarness) -> None:
    jobs = [harness.submit() for _ in range(5)]
    reconciler = harness.reconciler()

    reconciler.tick()
    reconciler.tick()

    assert sorted(reconciler._attempts) == sorted(job.id for job in jobs[:2])
    words = harness.jobs.explain(jobs[4].id).words
    assert "wait in Kueue, the most at once (kubernetes.waiting_limit = 2)" in words
    reconciler.stop()


@pytest.mark.slow
def test_a_job_that_kueue_preempts_is_queued_again_and_has_not_failed(harness: JobHarness) -> None:
    job, reconciler = waiting(harness)
    admitted(harness, job, reconciler)
    gone = AttemptState("ended", exit_code=1, evicted="Kueue preempted it: for another", preempted=True)
    harness.launcher.known[f"{job.id}/1"] = replace(gone, hosts=("here",), stopped=False)

    def again() -> bool:
        reconciler.tick()
        return f"{job.id}/2" in harness.launcher.known

    eventually(again)
    with harness.platform.database.read() as tx:
        ending = store.describe_ending(tx, job.id, 1)
        row = store.job_row(tx, job.id)
    assert ending == "attempt 1 was preempted: preempted: Kueue preempted it: for another"
    assert (row.preemptions, row.failures, row.state) == (1, 0, JobState.QUEUED)
    assert f"{job.id}/1" not in harness.launcher.known  # its object is deleted: Kueue cannot start it again
    reconciler.stop()


@pytest.mark.slow
def test_the_next_controller_finds_the_waiting_attempt_again(harness: JobHarness) -> None:
    job, reconciler = waiting(harness)

    reconciler.stop()
    second = harness.reconciler()
    second.tick()

    assert harness.launcher.stopped == []
    admitted(harness, job, second)
    assert harness.jobs.show(job.id).attempt == 1
    assert harness.launcher.runs == {f"{job.id}/1": 1}
    second.stop()


@pytest.mark.slow
def test_an_attempt_that_ended_while_no_controller_looked_is_charged_for_its_time(
    harness: JobHarness,
) -> None:
    job, reconciler = waiting(harness, gpus=2)
    reconciler.stop()
    began = harness.platform.clock()
    harness.platform.clock.advance(timedelta(hours=1))
    harness.launcher.known[f"{job.id}/1"] = replace(DONE, started_at=began, hosts=("here",))

    assert ends(harness, job, harness.reconciler()).state is JobState.DONE

    row = harness.platform.usage.show().total
    assert row.gpu_hours == pytest.approx(2, abs=0.1)


def test_a_spent_budget_keeps_a_job_out_of_kueue(harness: JobHarness) -> None:
    harness.platform.queues.set_budget("default", gpu_hours=1)
    job, reconciler = harness.submit(gpus=1, timeout=timedelta(hours=9)), harness.reconciler()

    reconciler.tick()

    assert reconciler._attempts == {}
    assert "the budget of its workspace does not cover it" in harness.jobs.explain(job.id).words


@pytest.mark.slow
def test_a_job_begins_once(harness: JobHarness) -> None:
    job, reconciler = waiting(harness)
    admitted(harness, job, reconciler)

    refusal = pytest.raises(Conflict, match="was not handed over, or has started")
    with acting_as(reconciler._context.service), on_terms(fence=harness.fence), refusal:
        harness.jobs.begin(job.id, attempt=1, hosts=("here",))
    reconciler.stop()


@pytest.mark.slow
def test_after_a_change_to_falaj_decides_waiting_attempts_are_taken_back(harness: JobHarness) -> None:
    job, reconciler = waiting(harness)
    reconciler.stop()
    harness.host = replace(harness.host, waiting_limit=None)
    harness.jobs._waiting_limit = None
    harness.launcher.program = lambda _: AttemptState("running")

    second = harness.reconciler()
    stopped(harness, job, second)

    def runs() -> bool:
        second.tick()
        return harness.jobs.show(job.id).state is JobState.RUNNING

    eventually(runs)
    assert (harness.jobs.show(job.id).attempt, harness.jobs.show(job.id).node) == (2, "here")
    second.stop()


def test_it_works_on_every_database(harness_of_each_database: JobHarness) -> None:
    harness = kueue_harness(harness_of_each_database)
    job, reconciler = waiting(harness, gpus=1)
    admitted(harness, job, reconciler)
    harness.launcher.known[f"{job.id}/1"] = replace(DONE, hosts=("here",))

    assert ends(harness, job, reconciler).state is JobState.DONE


@pytest.fixture
def harness_of_each_database(platform: object, tmp_path: object) -> JobHarness:
    return JobHarness(platform, tmp_path)  # type: ignore[arg-type]
