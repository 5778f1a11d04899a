"""Waiting jobs ask for nodes by pending pods of their shape, which go away when they start or are cancelled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster_testbed import ClusterTestbed
from falaj.drivers.kubernetes.placeholders import FOR_LABEL
from falaj.records.training.jobs import JobState
from pod_jobs import PodJobs, pod_jobs
from polling import eventually

HOLDS = "import time; print('up', flush=True); time.sleep(600)"
SHORT = "print('done', flush=True)"


def placeholders(jobs: PodJobs) -> dict[str, list[Any]]:
    """Return the pods that ask for nodes, by the job that waits."""
    found: dict[str, list[Any]] = {}
    for each in jobs.objects("pods"):
        if job := each["metadata"]["labels"].get(FOR_LABEL):
            found.setdefault(job, []).append(each)
    return found


def is_unschedulable(pod: Any) -> bool:
    conditions = {each["type"]: each for each in pod["status"].get("conditions", ())}
    return conditions.get("PodScheduled", {}).get("reason") == "Unschedulable"


def test_a_waiting_job_is_seen_by_autoscalers_until_it_starts_or_is_cancelled(
    worker_image: ClusterTestbed, namespace: str, tmp_path: Path
) -> None:
    with pod_jobs(worker_image, namespace, tmp_path, settings="scale_up = 3") as jobs:
        free = jobs.free_cpus()
        holds = jobs.submit(HOLDS, nodes=free)  # a CPU each
        eventually(lambda: jobs.log(holds).count("up") == free)

        waits = jobs.submit(SHORT, nodes=2, gpus=2)
        given_up, beyond = jobs.submit(SHORT), jobs.submit(SHORT)

        eventually(lambda: set(placeholders(jobs)) == {waits.id, given_up.id})
        assert [each.job for each in jobs.platform.nodes.scale_up()] == [waits.id, given_up.id]
        asked = [
            each["spec"]["containers"][0]["resources"]["requests"] for each in placeholders(jobs)[waits.id]
        ]
        assert asked == [{"cpu": "1", "nvidia.com/gpu": "2"}] * 2
        eventually(
            lambda: all(is_unschedulable(each) for pods in placeholders(jobs).values() for each in pods),
        )
        jobs.platform.jobs.cancel(given_up.id)
        eventually(lambda: set(placeholders(jobs)) == {waits.id, beyond.id})

        jobs.platform.jobs.cancel(holds.id)
        for each in (waits, beyond):
            done = jobs.ends(each)
            assert (done.state, done.reason) == (JobState.DONE, None), jobs.log(each)
        eventually(lambda: not placeholders(jobs))
