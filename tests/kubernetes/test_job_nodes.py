"""Jobs of several nodes: a pod each, which find each other by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster_testbed import ClusterTestbed
from falaj.records.scheduling.snapshot import Reason
from falaj.records.training.jobs import JobState
from pod_jobs import idle_pod, pod_jobs
from polling import eventually

MEET = """
import falaj as fj, os, socket, time
rank, address = int(os.environ["FALAJ_RANK"]), (os.environ["FALAJ_MASTER_ADDR"], int(os.environ["FALAJ_MASTER_PORT"]))
if rank == 0:
    with socket.create_server(("", address[1])) as server:
        peer = server.accept()[0]
        print("rank 0 heard", peer.recv(100).decode(), flush=True)
else:
    while True:
        try:
            socket.create_connection(address, timeout=5).sendall(b"rank 1")
            break
        except OSError:
            time.sleep(0.2)
(fj.job.outputs / f"{rank}.txt").write_text("made")
print("rank", rank, "of", os.environ["FALAJ_WORLD_SIZE"], flush=True)
"""
FAIL = """
import os, signal, sys, time
if os.environ["FALAJ_RANK"] == "1":
    sys.exit("rank 1 gives up")
signal.signal(signal.SIGTERM, lambda *_: (print("told", flush=True), sys.exit(0)))
time.sleep(600)
"""
SERVED = """
import json, os, time
role = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
print(role, "up", flush=True)
while role != "chief":
    time.sleep(0.05)
"""


@pytest.mark.parametrize("objects", ["job", pytest.param("jobset", marks=pytest.mark.slow)])
def test_two_pods_meet(
    addons: ClusterTestbed, worker_image: ClusterTestbed, namespace: str, tmp_path: Path, objects: str
) -> None:
    with pod_jobs(worker_image, namespace, tmp_path, objects=objects) as jobs:
        job = jobs.ends(jobs.submit(MEET, nodes=2, spread=True))
        assert (job.state, job.reason) == (JobState.DONE, None), jobs.log(job)
        assert sorted(jobs.log(job).splitlines()) == ["rank 0 heard rank 1", "rank 0 of 2", "rank 1 of 2"]
        assert sorted(each.path for each in job.outputs) == ["0.txt", "1.txt"]


def test_two_pods_wait_for_what_pods_of_others_hold(
    worker_image: ClusterTestbed, namespace: str, tmp_path: Path
) -> None:
    with pod_jobs(worker_image, namespace, tmp_path, objects="job") as jobs:
        free = jobs.free_cpus()
        theirs = idle_pod(namespace, "theirs", cpu="1200m")
        worker_image.kubectl("create", "-f", "-", stdin=json.dumps(theirs))
        eventually(lambda: jobs.free_now() < free)

        job = jobs.submit("print('made')", nodes=free, cpus=1)
        waits = eventually(lambda: jobs.platform.jobs.explain(job.id))

        assert (waits.state, waits.reason) == ("waiting", Reason.CAPACITY), waits.words
        assert jobs.platform.jobs.show(job.id).state is JobState.QUEUED
        worker_image.kubectl("delete", "pod", "theirs", "--namespace", namespace)
        job = jobs.ends(job)
        assert (job.state, job.reason) == (JobState.DONE, None), jobs.log(job)


def test_nodes_end_together(worker_image: ClusterTestbed, namespace: str, tmp_path: Path) -> None:
    with pod_jobs(worker_image, namespace, tmp_path, objects="job") as jobs:
        job = jobs.ends(jobs.submit(FAIL, nodes=2, spread=True))
        assert job.state is JobState.FAILED
        assert job.reason is not None
        assert "rank 1 gives up" in job.reason

        roles = {"chief": 1, "worker": 1, "ps": 2}  # the second node has parameter servers alone
        served = jobs.submit(SERVED, framework="tensorflow", nodes=2, roles=roles, spread=True)
        job = jobs.ends(served)  # although its parameter servers would go on
        assert (job.state, job.reason) == (JobState.DONE, None), jobs.log(job)
