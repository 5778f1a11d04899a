"""Nodes that exist in the API server alone: pods are placed on them, and nobody starts them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cluster_testbed import ClusterTestbed
from polling import eventually

RENEWAL_S = 10


@contextmanager
def invented_nodes(found: ClusterTestbed, count: int) -> Iterator[None]:
    """Cordon the real nodes, and add some without a kubelet, whose leases are renewed while the context is open."""
    real = [each["metadata"]["name"] for each in found.get("nodes")["items"]]
    names = [f"invented-{number}" for number in range(count)]
    over = threading.Event()
    if real:
        found.kubectl("cordon", *real)
    apply(found, [invented_node(name) for name in names])
    apply(found, [invented_node(name) for name in names], "--subresource=status")
    renewal = threading.Thread(target=renew_leases, args=(found, names, over))
    renewal.start()
    try:
        eventually(lambda: not tainted(found, names))  # as long as they count as not ready
        yield
    finally:
        over.set()
        renewal.join()
        found.kubectl("delete", "node", *names, "--wait=false")
        if real:
            found.kubectl("uncordon", *real)


def tainted(found: ClusterTestbed, names: list[str]) -> list[str]:
    nodes = {each["metadata"]["name"]: each["spec"] for each in found.get("nodes")["items"]}
    return [name for name in names if nodes[name].get("taints")]


def invented_node(name: str) -> dict[str, Any]:
    room = {"cpu": "64", "memory": "256Gi", "pods": "1000", "ephemeral-storage": "1Ti"}
    ready = {"type": "Ready", "status": "True", "reason": "Invented", "message": "it has no kubelet"}
    status = {"capacity": room, "allocatable": room, "conditions": [ready]}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": status}


def renew_leases(found: ClusterTestbed, names: list[str], over: threading.Event) -> None:
    while True:
        now = time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime())
        apply(
            found,
            [
                {
                    "apiVersion": "coordination.k8s.io/v1",
                    "kind": "Lease",
                    "metadata": {"name": name, "namespace": "kube-node-lease"},
                    "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now},
                }
                for name in names
            ],
        )
        if over.wait(RENEWAL_S):
            return


def apply(found: ClusterTestbed, manifests: list[dict[str, Any]], *options: str) -> None:
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
    found.kubectl("apply", "--server-side", "--force-conflicts", *options, "--filename", "-", stdin=listed)
