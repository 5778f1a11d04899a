"""Operating the nodes of a real cluster: cordons, drains, and slices of GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cluster_testbed import ClusterTestbed
from falaj.drivers.kubernetes.inventory.node_state import CORDON
from falaj.drivers.kubernetes.maintenance import KubernetesMaintenance
from falaj.errors import Conflict, NotFound, Unavailable
from falaj.ports.cluster.maintenance import CordonNote
from falaj.records.config import KubernetesConfig
from falaj.records.scheduling.hardware import Machine
from falaj.records.scheduling.mig import GpuSettings
from falaj.records.training.jobs import Job, JobState
from pod_jobs import PodJobs, pod_jobs
from polling import eventually

SLICE = "nvidia.com/mig-1g.10gb"
SAVES = """
import falaj as fj, signal, sys, time
print("attempt", fj.job.attempt, flush=True)
if fj.job.attempt == 1:
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
    time.sleep(600)
(fj.job.outputs / "result.txt").write_text("made")
"""
FOREIGN = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "foreign"},
    "spec": {
        "terminationGracePeriodSeconds": 1,
        "nodeSelector": {"kubernetes.io/hostname": "node-0"},
        "containers": [{"name": "c", "image": "base:1", "command": ["sleep", "600"]}],
    },
}


@pytest.fixture
def jobs(worker_image: ClusterTestbed, namespace: str, tmp_path: Path) -> Iterator[PodJobs]:
    with pod_jobs(worker_image, namespace, tmp_path) as made:
        yield made
    for name in ("node-0", "node-1"):
        worker_image.kubectl("uncordon", name)
        worker_image.kubectl("annotate", "node", name, f"{CORDON}{namespace}-")


@pytest.fixture
def foreign(cluster: ClusterTestbed) -> Iterator[str]:
    """Return the namespace of a pod of others on node-0."""
    cluster.kubectl("create", "namespace", "foreign")
    cluster.kubectl("create", "-n", "foreign", "-f", "-", stdin=json.dumps(FOREIGN))
    yield "foreign"
    cluster.kubectl("delete", "namespace", "foreign", "--wait=false")


def machine(jobs: PodJobs, name: str) -> Machine:
    return next(each for each in jobs.platform.nodes.list() if each.node.name == name)


def started(jobs: PodJobs, job: Job) -> None:
    """Wait until the script of a job has begun. Each look is an entry of the audit log, so they are few."""
    eventually(lambda: "attempt 1" in jobs.log(job) or jobs.state(job).ended)
    assert jobs.state(job) is JobState.RUNNING, jobs.log(job)


def becomes(jobs: PodJobs, name: str, is_so: Callable[[Machine], bool]) -> Machine:
    eventually(lambda: is_so(machine(jobs, name)))
    return machine(jobs, name)


def test_a_drained_node_loses_its_job_to_another_and_keeps_the_pods_of_others(
    jobs: PodJobs, namespace: str, foreign: str
) -> None:
    cluster, nodes, note = jobs.cluster, jobs.platform.nodes, f"{CORDON}{namespace}"
    assert cluster is not None
    cluster.kubectl("cordon", "node-1")
    seen = becomes(jobs, "node-1", lambda each: each.node.cordoned).cluster
    assert seen is not None
    assert seen.reason.startswith("cordoned by kubectl")
    assert seen.since is not None
    with pytest.raises(
        Conflict, match=r"not cordoned by this platform: cordoned by kubectl.*kubectl uncordon"
    ):
        nodes.uncordon("node-1")
    job = jobs.submit(SAVES)
    started(jobs, job)
    assert [each["spec"]["nodeName"] for each in jobs.pods(job)] == ["node-0"]
    cluster.kubectl("uncordon", "node-1")

    drained = nodes.drain("node-0", reason="a fan is replaced")

    assert drained.leaving == (job.id,)
    assert (foreign, "foreign") in {(each.namespace, each.name) for each in drained.others}
    closed = cluster.get("node", "node-0")
    assert closed["spec"]["unschedulable"] is True
    assert json.loads(closed["metadata"]["annotations"][note])["reason"] == "a fan is replaced"
    ended = jobs.ends(job)
    assert (ended.state, ended.attempt) == (JobState.DONE, 2), jobs.log(job)
    assert cluster.get("pod", "foreign", "-n", foreign)["status"]["phase"] == "Running"
    assert machine(jobs, "node-0").jobs == 0

    assert not nodes.uncordon("node-0").node.cordoned
    reopened = cluster.get("node", "node-0")
    assert "unschedulable" not in reopened["spec"]
    assert note not in reopened["metadata"]["annotations"]
    becomes(jobs, "node-0", lambda each: not each.node.cordoned)


@pytest.fixture
def sliced(cluster: ClusterTestbed) -> Iterator[str]:
    """Return the name of a node that offers two MIG slices."""

    def offer(count: str | None) -> None:
        slices = {SLICE: count}
        status = json.dumps({"status": {"capacity": slices, "allocatable": slices}})
        cluster.kubectl("patch", "node", "node-1", "--subresource=status", "--type=merge", "-p", status)

    offer("2")
    yield "node-1"
    offer(None)
    cluster.kubectl("label", "node", "node-1", "nvidia.com/mig.config-")


def test_a_job_gets_the_slice_that_it_was_placed_on(jobs: PodJobs, sliced: str) -> None:
    nodes = jobs.platform.nodes
    assert jobs.cluster is not None
    becomes(jobs, sliced, lambda each: "1g.10gb" in {gpu.profile for gpu in each.node.gpus})

    job = jobs.submit(SAVES, gpus=1, gpu_profile="1g.10gb")
    started(jobs, job)

    (pod,) = jobs.pods(job)
    asked = pod["spec"]["containers"][0]["resources"]["limits"]
    assert pod["spec"]["nodeName"] == "node-1"
    assert {name: asked[name] for name in asked if name.startswith("nvidia")} == {SLICE: "1"}
    settings = GpuSettings(mig="falaj-1")
    nodes.drain(sliced)
    with pytest.raises(Conflict, match="1 jobs run on node node-1"):
        nodes.configure_gpus(sliced, settings=settings)
    jobs.platform.jobs.cancel(job.id)
    assert jobs.ends(job).state is JobState.CANCELLED
    eventually(lambda: not jobs.pods(job))

    assert nodes.configure_gpus(sliced, settings=settings).before == GpuSettings()
    assert jobs.cluster.get("node", sliced)["metadata"]["labels"]["nvidia.com/mig.config"] == "falaj-1"


def test_missing_rights_and_nodes_are_named(cluster: ClusterTestbed, namespace: str, tmp_path: Path) -> None:
    note = CordonNote("alice", datetime(2026, 11, 16, tzinfo=UTC))
    cluster.kubectl("create", "serviceaccount", "reader", "-n", namespace)
    by = cluster.kubeconfig_of(namespace, "reader", tmp_path / "reader.kubeconfig")
    reader = KubernetesMaintenance(KubernetesConfig(kubeconfig=by), home="home_1")
    admin = KubernetesMaintenance(KubernetesConfig(kubeconfig=cluster.kubeconfig), home="home_1")
    try:
        with pytest.raises(Unavailable, match=r"cannot cordon node node-0: .*:reader may not get nodes"):
            reader.cordon("node-0", note)
        with pytest.raises(
            Unavailable, match=r"cannot list the pods of node node-0: .*:reader may not list pods"
        ):
            reader.pods("node-0")
        with pytest.raises(NotFound, match="ghost"):
            admin.cordon("ghost", note)
    finally:
        reader.close()
        admin.close()
