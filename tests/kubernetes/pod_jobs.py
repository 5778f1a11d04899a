"""A platform whose jobs run in pods of the cluster of the tests, with controllers as real processes."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_testbed import ClusterTestbed
from controller_processes import ControllerProcesses, run_controllers
from falaj.records.training.jobs import Job
from platforms import make_platform
from polling import eventually, let_pass
from worker_image import IMAGE

LEASE_S = 20.0
"""A controller that got no CPU for so long ends: the machines of the cluster share this one."""


@dataclass
class PodJobs(ControllerProcesses):
    """The platform, its controllers, and its namespace in the cluster."""

    cluster: ClusterTestbed | None = None
    namespace: str = ""

    def objects(self, kind: str) -> list[Any]:
        assert self.cluster is not None
        found: list[Any] = self.cluster.get(kind, "--namespace", self.namespace)["items"]
        return found

    def pods(self, job: Job) -> list[Any]:
        return [
            each for each in self.objects("pods") if each["metadata"]["labels"]["falaj.dev/job"] == job.id
        ]

    def apply(self, manifest: dict[str, Any]) -> None:
        """Create an object as an administrator of the cluster."""
        path = self.folder / "manifest.json"
        path.write_text(json.dumps(manifest))
        self.kubectl("apply", "--server-side", "--filename", str(path))

    def free_cpus(self, cluster: str | None = None) -> int:
        """Return how many CPUs are free, once pods of earlier tests are gone; the cluster's own may hold some."""
        testbed = self.cluster
        assert testbed is not None
        left = ("pods", "--all-namespaces", "--selector", "app.kubernetes.io/managed-by=falaj")
        eventually(lambda: not testbed.get(*left)["items"])
        return max(self.free_now(cluster) for _ in range(5))  # the watch may be a little behind

    def free_now(self, cluster: str | None = None) -> int:
        let_pass(0.3)
        found = [each for each in self.platform.nodes.list() if each.node.cluster == cluster]
        return sum(each.free.cpus for each in found if not each.node.cordoned)

    def kubectl(self, *words: str) -> str:
        assert self.cluster is not None
        return self.cluster.kubectl("--namespace", self.namespace, *words)


@contextmanager
def pod_jobs(
    cluster: ClusterTestbed,
    namespace: str,
    folder: Path,
    *,
    objects: str = "job",
    image: str = IMAGE,
    kubeconfig: Path | None = None,
    environments: Mapping[str, str] | None = None,
    fence_after: str = "20s",
    settings: str = "",
    others: Mapping[str, ClusterTestbed] | None = None,
    grace: str = "10s",
) -> Iterator[PodJobs]:
    """Yield a platform with a controller, whose namespaces begin with the name of `namespace`.

    They enforce the standard `restricted`: pods satisfy it, or the cluster refuses them. `kubeconfig` is that of the
    platform, if it is not the one of the tests. A test that kills the controller gives the next one time by
    `fence_after`. `settings` are further lines of [kubernetes]; `grace` is the time that a preempted job has to save
    itself. With `others`, jobs run in several clusters: `cluster` is called home, and those by their names; they are
    burst capacity.
    """
    host, port = address_of_this_machine(cluster), free_port()
    toml = f"""
[jobs]
launcher = "kubernetes"
fence_after = "{fence_after}"
preemption_grace = "{grace}"

[kubernetes]
kubeconfig = "{kubeconfig or cluster.kubeconfig}"
prefix = "{namespace}"
image = "{image}"
objects = "{objects}"
agent = "{"0.0.0.0" if others else host}:{port}"
agent_url = "tls://{host}:{port}"
{settings}
"""
    for name, each in (others or {}).items():
        seen = f"tls://{address_of_this_machine(each)}:{port}"
        toml += f'[kubernetes.clusters.{name}]\nkubeconfig = "{each.kubeconfig}"\nagent_url = "{seen}"\nburst = true\n'
    toml += "[kubernetes.clusters.home]\n" if others else ""
    toml += "\n[kubernetes.environments]\n"
    toml += "".join(f'{name} = "{pinned}"\n' for name, pinned in (environments or {}).items())
    with (
        make_platform(folder, toml=toml) as platform,
        run_controllers(platform, folder, lease_s=LEASE_S) as plain,
    ):
        jobs = PodJobs(plain.platform, plain.folder, plain.lease_s, plain.running, cluster, namespace)
        jobs.namespace = f"{namespace}-default"
        jobs.start_controller()
        try:
            yield jobs
        finally:
            for each in (cluster, *(others or {}).values()):
                each.kubectl("delete", "namespace", jobs.namespace, "--wait=false", "--ignore-not-found")


def idle_pod(
    namespace: str,
    name: str,
    *,
    cpu: str,
    gpus: int = 0,
    node: str = "node-0",
    labels: Mapping[str, str] = {},
) -> dict[str, Any]:
    """Return a pod that does nothing, on a node, as someone else than the platform would make it."""
    asked = {"cpu": cpu, "memory": "64Mi"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    sleeps = {
        "name": "c",
        "image": "base:1",
        "imagePullPolicy": "Never",
        "command": ["/bin/sleep", "600"],
        "resources": {"requests": asked, "limits": {k: v for k, v in asked.items() if "/" in k}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(labels)},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "containers": [sleeps],
            "terminationGracePeriodSeconds": 1,
        },
    }


def address_of_this_machine(cluster: ClusterTestbed) -> str:
    """Return the address by which pods reach this machine: the one that the API server sees."""
    server = re.search(r"https://([^:/\s\"]+):(\d+)", cluster.kubeconfig.read_text())
    assert server is not None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((server[1], int(server[2])))
        return str(probe.getsockname()[0])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
