"""Placeholder pods are made once, changed with the job, and removed with it."""

from __future__ import annotations

from typing import Any

import pytest

from falaj.drivers.kubernetes.cluster import FoundObject
from falaj.drivers.kubernetes.placeholders import (
    LIST_EVERY_S,
    KubernetesPlaceholders,
    name_for,
    placeholder_job,
)
from falaj.drivers.kubernetes.pods import HOME_LABEL, JOB_LABEL, PodSettings
from falaj.errors import Unavailable
from falaj.ports.cluster.placeholders import PlaceholderPods

SETTINGS = PodSettings("worker@sha256:1", "falaj", "tls://h:1", home="here", tolerate=("nvidia.com/gpu",))
TWO = PlaceholderPods(
    job="job_1",
    workspace="risk",
    pods=2,
    cpus=4,
    memory_bytes=2**30,
    gpus=("n/gpu-0", "n/gpu-1"),
    selector={"pool": "a"},
)


class FakeCluster:
    """Jobs in memory, and the requests that were made."""

    def __init__(self) -> None:
        self.jobs: dict[tuple[str, str], Any] = {}
        self.requests: list[str] = []
        self.refuses = ""
        self.is_full = False

    def lacks_room(self) -> bool:
        return self.is_full

    def create(self, manifest: Any) -> Any:
        name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
        self.requests.append(f"create {name}")
        if namespace == self.refuses:
            raise Unavailable("exceeded quota")
        self.jobs[namespace, name] = manifest
        return manifest

    def delete(self, api_version: str, kind: str, name: str, *, namespace: str) -> None:
        self.requests.append(f"delete {name}")
        self.jobs.pop((namespace, name), None)

    def list_objects(self, api_version: str, kind: str, *, namespace: str) -> list[FoundObject]:
        self.requests.append(f"list {namespace}")
        found = [each["metadata"] for (where, _), each in self.jobs.items() if where == namespace]
        return [FoundObject(each["name"], each.get("annotations", {})) for each in found]

    def ensure_for(self, workspace: str) -> str:
        return f"falaj-{workspace}"

    def existing(self) -> dict[str, str]:
        return {"falaj-risk": "risk", "falaj-fraud": "fraud"}


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


def keeper(cluster: Any, clock: Any = lambda: 0.0) -> KubernetesPlaceholders:
    return KubernetesPlaceholders(cluster, SETTINGS, cluster, clock=clock)


def test_pods_have_the_shape_of_the_job_and_give_way() -> None:
    made = placeholder_job(TWO, "falaj-risk", SETTINGS)

    template = made["spec"]["template"]
    (container,) = template["spec"]["containers"]
    amounts = {"cpu": "4", "memory": str(2**30), "nvidia.com/gpu": "2"}
    assert (made["spec"]["parallelism"], container["resources"]["requests"]) == (2, amounts)
    assert template["spec"]["nodeSelector"] == {"pool": "a"}
    assert template["metadata"]["annotations"] == {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"}
    assert template["metadata"]["labels"][HOME_LABEL] == "here"  # not counted as held by others
    assert JOB_LABEL not in template["metadata"]["labels"]  # a drained node does not requeue the job for them
    assert len(made["metadata"]["name"]) <= 40


def test_they_are_made_once_and_removed_when_nobody_wants_them(cluster: FakeCluster) -> None:
    kept = keeper(cluster)

    kept.keep([TWO])
    kept.keep([TWO])
    assert cluster.requests == ["list falaj-risk", "list falaj-fraud", f"create {name_for('job_1')}"]
    kept.keep([])
    kept.keep([])

    assert cluster.requests[3:] == [f"delete {name_for('job_1')}"]
    assert cluster.jobs == {}


def test_there_are_none_while_a_job_that_was_placed_finds_no_room(cluster: FakeCluster) -> None:
    kept = keeper(cluster)
    kept.keep([TWO])

    cluster.is_full = True
    kept.keep([TWO])
    assert cluster.jobs == {}
    cluster.is_full = False
    kept.keep([TWO])

    assert list(cluster.jobs) == [("falaj-risk", name_for("job_1"))]


def test_what_an_earlier_controller_left_is_removed_and_what_others_deleted_is_made_again(
    cluster: FakeCluster,
) -> None:
    now = 0.0
    keeper(cluster).keep([TWO])
    theirs = {"metadata": {"name": "attempt", "namespace": "falaj-risk"}}
    cluster.jobs["falaj-risk", "attempt"] = theirs
    kept = keeper(cluster, lambda: now)

    kept.keep([])
    assert list(cluster.jobs.values()) == [theirs]
    kept.keep([TWO])
    del cluster.jobs["falaj-risk", name_for("job_1")]
    now = LIST_EVERY_S
    kept.keep([TWO])

    assert ("falaj-risk", name_for("job_1")) in cluster.jobs


def test_a_refusal_keeps_no_other_from_being_made(cluster: FakeCluster) -> None:
    cluster.refuses = "falaj-risk"
    other = PlaceholderPods(job="job_2", workspace="fraud", pods=1, cpus=1)

    with pytest.raises(Unavailable, match="exceeded quota"):
        keeper(cluster).keep([TWO, other])

    assert list(cluster.jobs) == [("falaj-fraud", name_for("job_2"))]
