"""The inventory of a real cluster follows its nodes: cordoned, lost, and while the API server is away."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cluster_testbed import ClusterTestbed
from falaj.drivers.kubernetes.client import connect, resource_of, translated
from falaj.drivers.kubernetes.nodes import KubernetesNodes
from falaj.errors import Unavailable
from falaj.ports.cluster.manifests import ObjectKind
from falaj.ports.machine.hardware import NodeFacts
from falaj.records.config import KubernetesConfig
from falaj.records.scheduling.snapshot import HeldByOthers
from pod_jobs import idle_pod
from polling import eventually
from recorded_nodes import dra_gpu, resource_slice


@pytest.fixture
def config(cluster: ClusterTestbed) -> KubernetesConfig:
    return KubernetesConfig(kubeconfig=cluster.kubeconfig, zones={"desert-1": "local"})


@pytest.fixture
def inventory(config: KubernetesConfig) -> Iterator[KubernetesNodes]:
    made = KubernetesNodes(config)
    yield made
    made.close()


def find(inventory: KubernetesNodes, name: str) -> NodeFacts:
    return next(each for each in inventory.nodes() if each.name == name)


def state(inventory: KubernetesNodes, name: str) -> str:
    there = find(inventory, name).cluster
    assert there is not None
    return there.state


@pytest.mark.slow
def test_nodes_are_followed_through_cordon_restart_and_loss(
    cluster: ClusterTestbed, inventory: KubernetesNodes
) -> None:
    if cluster.program is None:
        pytest.skip("needs a cluster whose components can be stopped: set FALAJ_TEST_CLUSTER")
    assert [len(find(inventory, name).gpus) for name in ("node-0", "node-1")] == [8, 8]
    cluster.signal("kubelet-1", signal.SIGSTOP)  # it is lost once the grace period has passed
    try:
        cluster.kubectl("cordon", "node-0")
        eventually(lambda: state(inventory, "node-0") == "cordoned")
        cluster.kubectl("label", "node", "node-0", "topology.kubernetes.io/zone=desert-1")
        eventually(lambda: find(inventory, "node-0").cluster.zone == "local")  # type: ignore[union-attr]

        lists = inventory._nodes.lists
        cluster.restart("kube-apiserver")
        eventually(lambda: inventory._nodes.lists > lists and inventory.fault is None)
        cluster.kubectl("uncordon", "node-0")
        eventually(lambda: state(inventory, "node-0") == "ready")

        eventually(lambda: state(inventory, "node-1") == "lost")
    finally:
        cluster.signal("kubelet-1", signal.SIGCONT)
    eventually(lambda: state(inventory, "node-1") == "ready")
    cluster.kubectl("label", "node", "node-0", "topology.kubernetes.io/zone-")


def test_one_watch_sees_nodes_come_and_go(cluster: ClusterTestbed, config: KubernetesConfig) -> None:
    noticed = threading.Event()
    inventory = KubernetesNodes(config, on_change=noticed.set)
    names = {each.name for each in inventory.nodes()}
    noticed.clear()

    cluster.kubectl(
        "create", "-f", "-", stdin='{"apiVersion":"v1","kind":"Node","metadata":{"name":"ghost"}}'
    )
    try:
        eventually(lambda: {each.name for each in inventory.nodes()} == names | {"ghost"})
        assert noticed.is_set()
        assert state(inventory, "ghost") == "lost"
        slices = resource_slice("ghost", [dra_gpu(0), dra_gpu(1)])
        cluster.kubectl("create", "-f", "-", stdin=_json(slices))
        eventually(lambda: len(find(inventory, "ghost").gpus) == 2)
        assert find(inventory, "ghost").gpus[0].id.startswith("GPU-")
    finally:
        cluster.kubectl("delete", "node", "ghost")
        cluster.kubectl("delete", "resourceslice", "ghost-gpu.nvidia.com-x1", "--ignore-not-found")
    eventually(lambda: {each.name for each in inventory.nodes()} == names)
    assert inventory._nodes.lists == 1
    inventory.close()


def test_requests_of_pods_that_are_not_the_platforms_are_held(
    cluster: ClusterTestbed, config: KubernetesConfig, namespace: str
) -> None:
    with closing(KubernetesNodes(config, home="here")) as inventory:
        before = find(inventory, "node-0").others or HeldByOthers()

        cluster.kubectl("create", "-f", "-", stdin=_json(idle_pod(namespace, "theirs", cpu="1", gpus=3)))
        own = idle_pod(namespace, "ours", cpu="1", gpus=1, labels={"falaj.dev/home": "here"})
        cluster.kubectl("create", "-f", "-", stdin=_json(own))

        def held() -> HeldByOthers:
            return find(inventory, "node-0").others or HeldByOthers()

        eventually(lambda: held().gpus == {"": 3})
        assert held().cpus - before.cpus == 1
        assert held().memory_bytes - before.memory_bytes == 64 << 20
        cluster.kubectl("delete", "pod", "theirs", "--namespace", namespace, "--grace-period=1")
        eventually(lambda: held() == before)


def test_missing_rights_and_definitions_are_named(
    cluster: ClusterTestbed, config: KubernetesConfig, namespace: str, tmp_path: Path
) -> None:
    cluster.kubectl("create", "serviceaccount", "nobody", "-n", namespace)
    path = cluster.kubeconfig_of(namespace, "nobody", tmp_path / "nobody.kubeconfig")
    unknown = resource_of(ObjectKind("example.com", "v1", "Thing", "things", namespaced=True))

    with pytest.raises(Unavailable, match=f"system:serviceaccount:{namespace}:nobody may not list nodes"):
        nodes_by(path)
    client = connect(config)
    with pytest.raises(Unavailable, match=r"does not serve example\.com/v1"), translated("list things"):
        list(client.list(unknown, namespace=namespace))
    client.close()
    path.write_text(re.sub(r'"token": "[^"]*"', '"token": "expired"', path.read_text()))
    with pytest.raises(Unavailable, match="they have expired or were revoked"):
        nodes_by(path)


def nodes_by(kubeconfig: Path) -> list[NodeFacts]:
    with closing(KubernetesNodes(KubernetesConfig(kubeconfig=kubeconfig))) as inventory:
        return inventory.nodes()


def _json(document: object) -> str:
    return json.dumps(document)
