"""A job of 500 pods at once, on invented nodes: started once, followed, and taken away without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster_testbed import ClusterTestbed
from falaj.records.training.jobs import Job, JobState
from invented_nodes import invented_nodes
from pod_jobs import PodJobs, pod_jobs
from polling import eventually

PODS = 500

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture
def jobs(cluster: ClusterTestbed, namespace: str, tmp_path: Path) -> Iterator[PodJobs]:
    with (
        invented_nodes(cluster, 8),
        pod_jobs(cluster, namespace, tmp_path, fence_after="10m", grace="5s") as made,
    ):
        yield made


def uids(jobs: PodJobs, job: Job) -> set[str]:
    return {each["metadata"]["uid"] for each in jobs.pods(job)}


def placed(jobs: PodJobs, job: Job) -> list[Any]:
    return [each for each in jobs.pods(job) if each["spec"].get("nodeName", "").startswith("invented-")]


def test_five_hundred_pods_are_made_once_and_leave_nothing(jobs: PodJobs) -> None:
    job = jobs.submit("print('hello')", nodes=PODS)
    eventually(lambda: len(placed(jobs, job)) == PODS)
    made = uids(jobs, job)

    jobs.running[0].kill()
    jobs.running[0].wait()
    jobs.start_controller()
    other = jobs.submit("print('hello')")
    eventually(lambda: len(placed(jobs, other)) == 1)  # it goes on with others
    assert uids(jobs, job) == made
    assert jobs.platform.jobs.show(job.id).attempt == 1

    for each in (job, other):
        jobs.platform.jobs.cancel(each.id)
    eventually(lambda: all(jobs.state(each) is JobState.CANCELLED for each in (job, other)))
    jobs.kubectl("delete", "pods", "--all", "--grace-period=0", "--force")  # what a kubelet would do
    for kind in ("jobs", "pods", "services", "secrets"):
        eventually(lambda kind=kind: jobs.objects(kind) == [])  # type: ignore[misc]
