"""The queues in a real Kueue: applied, edited by others and put back; jobs borrow, share by weight and give back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster_testbed import ClusterTestbed
from falaj.records.scheduling.kueue import ObjectDrift
from falaj.records.scheduling.snapshot import Quota
from platforms import OwnPlatform, make_platform
from polling import eventually

GPU = "nvidia.com/gpu"
FAIR = "fairSharing:\n  preemptionStrategies: [LessThanOrEqualToFinalShare, LessThanInitialShare]\n"


@pytest.fixture(scope="module")
def fair_kueue(addons: ClusterTestbed) -> ClusterTestbed:
    """Return the cluster with a Kueue that shares by weight, which is an option of Kueue's own configuration."""
    settings = addons.get("configmap", "kueue-manager-config", "-n", "kueue-system")
    text = settings["data"]["controller_manager_config.yaml"]
    if "\nfairSharing:" not in text:
        data = {"controller_manager_config.yaml": f"{text}\n{FAIR}"}
        patch = ("patch", "configmap", "kueue-manager-config", "-n", "kueue-system", "--type=merge", "-p")
        addons.kubectl(*patch, json.dumps({"data": data}))
        addons.kubectl("rollout", "restart", "deployment", "-n", "kueue-system")
    addons.kubectl("rollout", "status", "deployment", "-n", "kueue-system", "--timeout=100s")
    eventually(lambda: len(addons.get("pods", "-n", "kueue-system")["items"]) == 1)
    asks = ("create", "--dry-run=server", "--filename", "-")
    for kind in ("ResourceFlavor", "ClusterQueue"):  # until its webhooks answer
        probe = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": {"name": "probe"}}
        eventually(lambda probe=probe: addons.kubectl(*asks, stdin=json.dumps(probe)))  # type: ignore[misc]
    return addons


@pytest.fixture
def platform(fair_kueue: ClusterTestbed, namespace: str, tmp_path: Path) -> Iterator[OwnPlatform]:
    """Return a platform on the cluster; its objects are named after the namespace, and deleted afterwards."""
    prefix = "f" + namespace.rpartition("-")[2]
    toml = f'[kubernetes]\nkubeconfig = "{fair_kueue.kubeconfig}"\nprefix = "{prefix}"\n'
    with make_platform(tmp_path, toml=toml) as made:
        fair_kueue.kubectl("create", "namespace", f"{prefix}-default")
        yield made
        everything = ("jobs", "--all", "-n", f"{prefix}-default", "--cascade=foreground", "--timeout=60s")
        fair_kueue.kubectl("delete", *everything)  # other tests want its GPUs
        fair_kueue.kubectl("delete", "namespace", f"{prefix}-default", "--wait=false")
        kinds = "clusterqueue,cohort,resourceflavor,workloadpriorityclass,topology"
        fair_kueue.kubectl("delete", kinds, "-l", f"falaj.dev/platform={prefix}", "--wait=false")


def prefix_of(platform: OwnPlatform) -> str:
    assert platform.parts.config.kubernetes is not None
    return platform.parts.config.kubernetes.prefix


def job(
    platform: OwnPlatform, name: str, queue: str, gpus: int, *, priority: str = "normal"
) -> dict[str, Any]:
    """Return a suspended Job that holds GPUs for as long as it is there."""
    prefix = prefix_of(platform)
    container = {
        "name": "main",
        "image": "base:1",
        "imagePullPolicy": "Never",
        "command": ["sleep", "600"],
        "resources": {"requests": {"cpu": "10m", "memory": "8Mi"}, "limits": {GPU: str(gpus)}},
    }
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": f"{prefix}-default",
            "labels": {
                "kueue.x-k8s.io/queue-name": queue,
                "kueue.x-k8s.io/priority-class": f"{prefix}-{priority}",
            },
        },
        "spec": {"suspend": True, "template": {"spec": pod}},
    }


def running(cluster: ClusterTestbed, platform: OwnPlatform) -> list[str]:
    """Return the names of the jobs that Kueue has admitted."""
    jobs = cluster.get("jobs", "-n", f"{prefix_of(platform)}-default")["items"]
    return sorted(each["metadata"]["name"] for each in jobs if not each["spec"].get("suspend"))


def create(cluster: ClusterTestbed, *jobs: dict[str, Any]) -> None:
    cluster.kubectl(
        "create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": jobs})
    )


def states(objects: tuple[ObjectDrift, ...]) -> set[str]:
    return {each.state for each in objects}


def test_queues_are_applied_once_and_edits_are_put_back(
    fair_kueue: ClusterTestbed, platform: OwnPlatform
) -> None:
    prefix = prefix_of(platform)
    platform.queues.set("bank", quota=Quota(gpus=8))
    platform.queues.set("risk", quota=Quota(gpus=4), limit=Quota(gpus=8), parent="bank", weight=0.5)

    first = platform.queues.apply()
    eventually(lambda: active(fair_kueue, f"{prefix}-risk"))
    again = platform.queues.apply()

    assert states(first.changed) == {"missing"}
    assert (again.changed, again.left, again.same) == ((), (), len(first.changed))

    edit = [{"op": "replace", "path": f"{RESOURCES}/2/nominalQuota", "value": "7"}]
    fair_kueue.kubectl("patch", "clusterqueue", f"{prefix}-risk", "--type=json", "-p", json.dumps(edit))
    (drift,) = platform.queues.diff().objects
    (field,) = drift.fields
    assert (drift.kind, drift.name, field.cluster, field.rendered) == (
        *("ClusterQueue", f"{prefix}-risk"),
        *('"7"', '"4"'),
    )
    assert field.field.endswith(f"resources[{GPU}].nominalQuota")
    platform.queues.apply()
    assert platform.queues.diff().objects == ()

    platform.queues.remove("risk")
    done = platform.queues.apply()
    gone = [(each.kind, each.state) for each in done.changed if each.state == "extra"]
    assert gone == [("LocalQueue", "extra"), ("ClusterQueue", "extra"), ("Cohort", "extra")]
    assert platform.queues.diff().objects == ()


RESOURCES = "/spec/resourceGroups/0/flavors/0/resources"


def active(cluster: ClusterTestbed, queue: str) -> bool:
    conditions = cluster.get("clusterqueue", queue).get("status", {}).get("conditions", [])
    return any(each["type"] == "Active" and each["status"] == "True" for each in conditions)


def test_jobs_borrow_share_by_weight_and_give_back(fair_kueue: ClusterTestbed, platform: OwnPlatform) -> None:
    """16 GPUs: `owner` is guaranteed 4, `wide` (weight 2) and `thin` (weight 1) have only what is idle.

    `bounded` may borrow everything, but the limit of its parent holds for it too.
    """
    everything = Quota()
    platform.queues.set("owner", quota=Quota(gpus=4))
    platform.queues.set("wide", quota=Quota(gpus=0), limit=everything, weight=2)
    platform.queues.set("thin", quota=Quota(gpus=0), limit=everything, weight=1)
    platform.queues.set("team", quota=Quota(gpus=0), limit=Quota(gpus=2))
    platform.queues.set("bounded", quota=Quota(gpus=0), limit=everything, parent="team")
    platform.queues.apply()
    prefix = prefix_of(platform)
    for queue in ("owner", "wide", "thin", "bounded"):
        eventually(lambda queue=queue: active(fair_kueue, f"{prefix}-{queue}"))

    create(fair_kueue, *(job(platform, f"bounded-{n}", "bounded", 1) for n in range(3)))
    eventually(lambda: refused(fair_kueue, platform))
    assert len(running(fair_kueue, platform)) == 2
    fair_kueue.kubectl("delete", "jobs", "--all", "-n", f"{prefix}-default")

    create(fair_kueue, *(job(platform, f"thin-{n}", "thin", 2) for n in range(8)))
    eventually(lambda: len(running(fair_kueue, platform)) == 8)  # all 16, also owner's 4

    create(fair_kueue, *(job(platform, f"wide-{n}", "wide", 2) for n in range(8)))
    eventually(
        lambda: shares(fair_kueue, platform) in ({"thin": 3, "wide": 5}, {"thin": 2, "wide": 6}),
    )

    create(fair_kueue, *(job(platform, f"owner-{n}", "owner", 2) for n in range(3)))
    eventually(lambda: shares(fair_kueue, platform).get("owner") == 2)  # not a third
    assert sum(shares(fair_kueue, platform).values()) <= 8


def refused(cluster: ClusterTestbed, platform: OwnPlatform) -> list[str]:
    """Return why jobs wait, where Kueue has tried to admit them."""
    found = cluster.get("workloads", "-n", f"{prefix_of(platform)}-default")["items"]
    conditions = [each for workload in found for each in workload.get("status", {}).get("conditions", [])]
    said = [
        each["message"] for each in conditions if (each["type"], each["status"]) == ("QuotaReserved", "False")
    ]
    return [message for message in said if "insufficient" in message]


def shares(cluster: ClusterTestbed, platform: OwnPlatform) -> dict[str, int]:
    """Return how many jobs of each queue run."""
    names = [name.partition("-")[0] for name in running(cluster, platform)]
    return {queue: names.count(queue) for queue in set(names)}
