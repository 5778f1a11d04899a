"""The NodeInventory contract over the nodes of a real cluster: the tests of tests/contracts, collected again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from cluster_testbed import ClusterTestbed
from falaj.drivers.kubernetes.nodes import KubernetesNodes
from falaj.ports.machine.hardware import NodeFacts
from falaj.records.config import KubernetesConfig
from falaj.records.scheduling.snapshot import HeldByOthers
from pod_jobs import idle_pod
from polling import eventually
from test_launcher_contract import loaded

globals().update(
    {name: each for name, each in vars(loaded("test_node_inventory")).items() if name.startswith("test_")}
)


@pytest.fixture(scope="module")
def inventory(cluster: ClusterTestbed) -> Iterator[KubernetesNodes]:
    """Return the inventory of a cluster in which someone else has a pod with GPUs."""
    pod = idle_pod("default", "inventory-contract", cpu="700m", gpus=3)
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(pod))
    config = KubernetesConfig(kubeconfig=cluster.kubeconfig)
    try:
        with closing(KubernetesNodes(config, home="contract")) as made:
            eventually(lambda: any(each.others for each in made.nodes()))
            eventually(lambda: any(has_free_cpus(each) for each in made.nodes()))
            yield made
    finally:
        cluster.kubectl("delete", "pod", "inventory-contract", "--namespace", "default", "--wait=false")


def has_free_cpus(node: NodeFacts) -> bool:
    """Tell whether the pods of the tests before have left CPUs of a node."""
    return node.cpus > (node.others or HeldByOthers()).cpus
