"""Two real clusters as pools: jobs run, are found, cancelled and swept in the cluster on which they were placed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cluster_testbed import ClusterTestbed
from falaj.drivers.kubernetes.pods import object_name
from falaj.errors import NotFound
from falaj.records.names import new_id
from falaj.records.training.jobs import Job, JobState
from pod_jobs import PodJobs, pod_jobs
from polling import eventually

WAITS = """
import falaj as fj, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print("up", flush=True)
for _ in range(3000):
    time.sleep(0.1)
"""
SHORT = "print('done', flush=True)"
LEFT_BEHIND = """
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
  namespace: {namespace}
  labels: {{app.kubernetes.io/managed-by: falaj, falaj.dev/home: {home}}}
  annotations: {{falaj.dev/attempt-name: {attempt}}}
spec:
  suspend: true
  template: {{spec: {{restartPolicy: Never, containers: [{{name: c, image: "base:1"}}]}}}}
"""


def placed(jobs: PodJobs, job: Job) -> str:
    """Return the cluster in which a job runs."""
    return (jobs.platform.jobs.show(job.id).node or "").partition(".")[0]


def pods_in(cluster: ClusterTestbed, jobs: PodJobs, job: Job) -> int:
    found = cluster.get("pods", "--namespace", jobs.namespace, "--selector", f"falaj.dev/job={job.id}")
    return len(found["items"])


def test_jobs_run_and_end_in_the_cluster_in_which_they_were_placed(
    worker_image: ClusterTestbed, second_cluster: ClusterTestbed, namespace: str, tmp_path: Path
) -> None:
    home, cloud = worker_image, second_cluster
    with pod_jobs(home, namespace, tmp_path, others={"cloud": cloud}) as jobs:
        nodes = jobs.platform.nodes.list()
        assert {each.node.name for each in nodes} == {"home.node-0", "home.node-1", "cloud.node-0"}
        assert {each.node.pool for each in nodes if each.node.burst} == {"cloud"}
        free = jobs.free_cpus("home")

        gang = jobs.submit(WAITS, nodes=free)  # a CPU each
        eventually(lambda: jobs.log(gang).count("up") == free)
        burst = jobs.submit(WAITS)
        eventually(lambda: jobs.log(burst).count("up") == 1)

        assert (placed(jobs, gang), placed(jobs, burst)) == ("home", "cloud")
        assert (pods_in(home, jobs, gang), pods_in(cloud, jobs, gang)) == (free, 0)
        assert (pods_in(home, jobs, burst), pods_in(cloud, jobs, burst)) == (0, 1)
        words = jobs.platform.jobs.explain(burst.id).words
        assert "burst capacity of cloud: the others could not take it" in words

        cloud.signal("kube-apiserver", signal.SIGSTOP)  # it does not answer, which is worse than a refusal
        try:
            jobs.platform.jobs.cancel(gang.id)
            assert jobs.ends(gang).state is JobState.CANCELLED
            short = jobs.ends(jobs.submit(SHORT, nodes=2))
            assert (short.state, short.reason) == (JobState.DONE, None)
            assert jobs.platform.jobs.show(burst.id).state is JobState.RUNNING
        finally:
            cloud.signal("kube-apiserver", signal.SIGCONT)
        jobs.platform.jobs.cancel(burst.id)
        assert jobs.ends(burst).state is JobState.CANCELLED
        eventually(lambda: pods_in(cloud, jobs, burst) == 0)


@pytest.mark.slow
def test_leftovers_are_swept_and_nodes_cordoned_in_each_cluster(
    worker_image: ClusterTestbed, second_cluster: ClusterTestbed, namespace: str, tmp_path: Path
) -> None:
    with pod_jobs(worker_image, namespace, tmp_path, others={"cloud": second_cluster}) as jobs:
        jobs.platform.clusters.apply()
        attempt = f"{new_id('job')}/1"
        left = LEFT_BEHIND.format(
            namespace=jobs.namespace,
            home=jobs.platform.home.ident,
            attempt=attempt,
            name=object_name(attempt),
        )
        second_cluster.kubectl("create", "-f", "-", stdin=left)

        jobs.running[-1].kill()
        jobs.start_controller()

        def is_gone() -> bool:
            return not second_cluster.get("jobs", "--namespace", jobs.namespace)["items"]

        eventually(is_gone)
        jobs.platform.nodes.cordon("cloud.node-0", reason="repair")
        assert second_cluster.get("node", "node-0")["spec"]["unschedulable"]
        assert "unschedulable" not in worker_image.get("node", "node-0")["spec"]
        jobs.platform.nodes.uncordon("cloud.node-0")
        assert "unschedulable" not in second_cluster.get("node", "node-0")["spec"]
        with pytest.raises(NotFound, match="there is no node node-0"):
            jobs.platform.nodes.cordon("node-0")
