"""Jobs in pods of a real cluster: from `falaj train` to the recorded end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_testbed import ClusterTestbed
from falaj.records.training.jobs import Job, JobState
from pod_jobs import PodJobs, pod_jobs
from polling import eventually

TALK = """
import falaj as fj, os
print("hello", os.getuid(), flush=True)
fj.job.log(step=1, loss=0.5)
(fj.job.outputs / "result.txt").write_text("made")
"""

WAITS = """
import falaj as fj, os, time
print("hello", os.getuid(), flush=True)
while not os.path.exists("/tmp/go"):
    time.sleep(0.05)
fj.job.log(step=1, loss=0.5)
(fj.job.outputs / "result.txt").write_text("made")
"""
TOUCH = ("python3", "-c", "open('/tmp/go', 'w')")
SAVES = """
import signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("hello", flush=True)
time.sleep(600)
"""


@pytest.fixture
def jobs(worker_image: ClusterTestbed, namespace: str, tmp_path: Path) -> Iterator[PodJobs]:
    with pod_jobs(worker_image, namespace, tmp_path) as made:
        yield made


def test_a_job_runs_in_a_restricted_pod_and_leaves_nothing_behind(jobs: PodJobs) -> None:
    job = jobs.ends(jobs.submit(TALK, memory_bytes=256 << 20))

    assert_done(jobs, job)
    eventually(lambda: not jobs.objects("pods,jobs,secrets"))


@pytest.mark.parametrize(
    ("objects", "kinds"), [("jobset", "jobsets"), ("auto", "trainjobs,trainingruntimes")]
)
def test_a_job_runs_as_an_object_of_its_kind(
    addons: ClusterTestbed,
    worker_image: ClusterTestbed,
    namespace: str,
    tmp_path: Path,
    objects: str,
    kinds: str,
) -> None:
    with pod_jobs(addons, namespace, tmp_path, objects=objects) as jobs:
        job = jobs.submit(WAITS)
        eventually(lambda: "hello" in jobs.log(job))

        made = jobs.objects(kinds)
        assert {each["kind"] for each in made} <= {"JobSet", "TrainJob", "TrainingRuntime"}
        assert all(each["metadata"]["labels"]["falaj.dev/job"] == job.id for each in made)
        jobs.kubectl("exec", jobs.pods(job)[0]["metadata"]["name"], "--", *TOUCH)

        assert_done(jobs, jobs.ends(job))
        eventually(lambda: not jobs.objects(f"{kinds},pods,jobs,secrets"))


def assert_done(jobs: PodJobs, job: Job) -> None:
    assert (job.state, job.reason) == (JobState.DONE, None), jobs.log(job)
    assert jobs.log(job) == "hello 65532\n"
    assert jobs.points(job)["loss"] == 1
    assert [each.path for each in job.outputs] == ["result.txt"]


# -------------------------------------------------------------------------------------------- bad ends


def test_a_failing_script_has_its_exit_code_and_its_exception(jobs: PodJobs) -> None:
    job = jobs.ends(jobs.submit("raise ValueError('bad column')"))

    assert (job.state, job.exit_code) == (JobState.FAILED, 1)
    assert job.reason == "Exit code 1: ValueError: bad column"


def test_a_cancelled_job_may_save_itself_and_its_log_streams_meanwhile(jobs: PodJobs) -> None:
    job = jobs.submit(SAVES)
    eventually(lambda: "hello" in jobs.log(job))
    assert "hello" in jobs.kubectl("logs", jobs.pods(job)[0]["metadata"]["name"])

    jobs.platform.jobs.cancel(job.id)

    assert jobs.ends(job).state is JobState.CANCELLED
    assert jobs.log(job) == "hello\nsaved\n"
    eventually(lambda: not jobs.objects("pods,jobs,secrets"))


def test_a_deleted_pod_saves_itself_and_its_job_continues_in_another(jobs: PodJobs) -> None:
    job = jobs.submit(SAVES)
    eventually(lambda: "hello" in jobs.log(job))

    jobs.kubectl("delete", "pod", jobs.pods(job)[0]["metadata"]["name"], "--wait=false")

    eventually(lambda: jobs.platform.jobs.show(job.id).attempt == 2)
    eventually(lambda: "hello" in jobs.log(job))
    jobs.platform.jobs.cancel(job.id)
    jobs.ends(job)


def test_a_kubelet_and_a_controller_that_are_killed_make_nothing_run_twice(
    worker_image: ClusterTestbed, namespace: str, tmp_path: Path
) -> None:
    with pod_jobs(worker_image, namespace, tmp_path, fence_after="5m") as jobs:
        job = jobs.submit(WAITS)
        eventually(lambda: "hello" in jobs.log(job))
        (pod,) = jobs.pods(job)

        jobs.running[0].kill()
        if worker_image.program is not None:
            worker_image.restart(f"kubelet-{pod['spec']['nodeName'].rpartition('-')[2]}")
        jobs.start_controller()
        eventually(jobs.is_led_by_the_newest)
        exec_in_pod = ("exec", pod["metadata"]["name"], "--", *TOUCH)
        eventually(lambda: jobs.kubectl(*exec_in_pod) == "")
        ended = jobs.ends(job)

        assert ended.attempt == 1
        assert_done(jobs, ended)


def test_an_image_that_is_not_there_is_explained_while_the_job_waits(
    worker_image: ClusterTestbed, namespace: str, tmp_path: Path
) -> None:
    with pod_jobs(worker_image, namespace, tmp_path, image="localhost/none:1") as jobs:
        job = jobs.submit(TALK)

        reason = eventually(lambda: jobs.platform.jobs.show(job.id).reason)

        assert "Its image localhost/none:1 cannot be pulled" in reason
        jobs.platform.jobs.cancel(job.id)
        assert jobs.ends(job).state is JobState.CANCELLED


def test_a_pod_that_runs_out_of_memory_says_so_like_a_process(jobs: PodJobs) -> None:
    script = "print('up', flush=True)\nx = [bytearray(1 << 20) for _ in range(2000)]"

    job = jobs.ends(jobs.submit(script, memory_bytes=64 << 20))

    assert job.state is JobState.FAILED
    assert job.reason in (
        "Killed by SIGKILL; it ran out of memory: it may have 64 MiB",
        "Its pod ran out of memory, and the kernel killed it (OOMKilled)",
    )
