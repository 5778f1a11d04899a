"""Kueue decides, on a real cluster: jobs wait for quota, preempt each other and resume, and say what they wait for."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_testbed import ClusterTestbed
from falaj.records.scheduling.snapshot import Quota
from falaj.records.training.jobs import Job, JobState
from falaj.training import store
from pod_jobs import PodJobs, pod_jobs
from polling import eventually

SAVES = """
import falaj as fj, signal, sys, time
from falaj.training.runtime.checkpointing.storage.store import Retention, SaveId
kept = fj.job._connected().checkpoints()
def save(*_):
    this = SaveId(7, "a" * 32)
    kept.save_part(this, 0, [b"state"])
    kept.commit(this, [5], b"manifest", Retention())
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
if kept.steps():
    print("resumed from", kept.steps()[0], bytes(kept.load_part(7, 0, offset=0, length=5)), flush=True)
else:
    print("began", flush=True)
    time.sleep(600)
"""
TALK = "print('hello', flush=True)"
SMALL = {"gpus": 1, "memory_bytes": 256 << 20, "queue": "risk"}


@pytest.fixture(
    params=[
        "job",
        pytest.param("jobset", marks=pytest.mark.slow),
        pytest.param("trainjob", marks=pytest.mark.slow),
    ]
)
def objects(request: pytest.FixtureRequest) -> str:
    """Return the kind of object that Kueue admits."""
    return str(request.param)


@pytest.fixture
def jobs(
    addons: ClusterTestbed, worker_image: ClusterTestbed, objects: str, tmp_path: Path
) -> Iterator[PodJobs]:
    """Return a platform whose queue `risk` has room for one GPU; the controller brings it to Kueue by itself."""
    prefix = f"f{uuid.uuid4().hex[:8]}"
    try:
        with pod_jobs(addons, prefix, tmp_path, objects=objects, settings='scheduler = "kueue"') as made:
            made.platform.queues.set("risk", quota=Quota(gpus=1))
            yield made
    finally:
        kinds = "clusterqueue,cohort,resourceflavor,workloadpriorityclass"
        addons.kubectl("delete", kinds, "-l", f"falaj.dev/platform={prefix}", "--wait=false")


def explained(jobs: PodJobs, job: Job) -> str:
    return jobs.platform.jobs.explain(job.id).words


def ending(jobs: PodJobs, job: Job, attempt: int) -> str | None:
    with jobs.platform.database.read() as tx:
        return store.describe_ending(tx, job.id, attempt)


def test_a_job_waits_for_quota_is_preempted_by_a_higher_priority_and_resumes(jobs: PodJobs) -> None:
    low = jobs.submit(SAVES, priority=-1000, **SMALL)
    eventually(lambda: "began" in jobs.log(low))
    running = jobs.platform.jobs.show(low.id)
    assert running.state is JobState.RUNNING
    assert running.node == jobs.pods(low)[0]["spec"]["nodeName"]

    second = jobs.submit(TALK, priority=-1000, **SMALL)
    wanted = "Kueue waits for quota: insufficient unused quota for nvidia.com/gpu in flavor"
    eventually(lambda: wanted in explained(jobs, second))
    assert jobs.state(second) is JobState.QUEUED
    assert jobs.platform.queues.show("risk").waiting == 1
    jobs.platform.jobs.cancel(second.id)
    assert jobs.ends(second).state is JobState.CANCELLED

    high = jobs.submit(TALK, priority=1000, **SMALL)
    assert jobs.ends(high).state is JobState.DONE
    resumed = jobs.ends(low)

    assert (resumed.state, resumed.attempt, resumed.preemptions) == (JobState.DONE, 2, 1), resumed.reason
    assert "resumed from 7 b'state'" in jobs.log(low)
    assert "Kueue preempted it" in (ending(jobs, low, 1) or "")
    eventually(lambda: not jobs.objects("pods,jobs,secrets,workloads"))
    charged = set(jobs.platform.rows_of("SELECT job FROM scheduling_usage"))
    assert charged == {low.id, high.id}  # what only waited is not charged


@pytest.mark.slow
def test_a_queue_that_is_stopped_is_named_until_it_goes_on(jobs: PodJobs) -> None:
    prefix = jobs.namespace.removesuffix("-default")
    stop = '{"spec":{"stopPolicy":"%s"}}'
    name = f"{prefix}-risk"
    eventually(lambda: name in jobs.kubectl("get", "clusterqueues", "-o", "name"))
    jobs.kubectl("patch", "clusterqueue", name, "--type=merge", "-p", stop % "Hold")

    job = jobs.submit(TALK, **SMALL)

    sentence = f"Kueue admits nothing: ClusterQueue {name} is stopped (stopPolicy Hold)"
    eventually(lambda: jobs.platform.jobs.show(job.id).reason == sentence)
    assert explained(jobs, job) == sentence
    jobs.kubectl("patch", "clusterqueue", name, "--type=merge", "-p", stop % "None")
    assert jobs.ends(job).state is JobState.DONE
