"""What pods of others hold of a node, as the cluster's scheduler counts it."""

from __future__ import annotations

from typing import Any

import pytest

from falaj.drivers.kubernetes.inventory.node_facts import facts_of
from falaj.drivers.kubernetes.inventory.other_pods import PodRequests, held_on, requests_of, with_others
from falaj.records.config import KubernetesConfig
from falaj.records.scheduling.snapshot import HeldByOthers
from recorded_nodes import DGX_H100, MIG_MIXED, node

MIB = 2**20


def asks(**requests: str) -> dict[str, Any]:
    named = {name.replace("gpu", "nvidia.com/gpu"): amount for name, amount in requests.items()}
    return {"name": "c", "resources": {"requests": named}}


def pod(*containers: dict[str, Any], phase: str = "Running", on: str = "n", **spec: Any) -> dict[str, Any]:
    placed = {"nodeName": on} if on else {}
    return {"spec": {"containers": list(containers), **placed, **spec}, "status": {"phase": phase}}


def test_containers_are_added_and_initialization_counts_if_it_needs_more() -> None:
    small = pod(asks(cpu="100m", memory="70Mi"), asks(cpu="0.25"), initContainers=[asks(cpu="200m")])
    large = pod(asks(cpu="100m"), initContainers=[asks(cpu="2", memory="1Gi"), asks(cpu="500m")])

    assert requests_of(small) == PodRequests("n", 350, 70 * MIB)
    assert requests_of(large) == PodRequests("n", 2000, 1024 * MIB)


def test_sidecars_count_beside_containers_and_later_steps() -> None:
    sidecar = asks(cpu="300m") | {"restartPolicy": "Always"}

    beside = pod(asks(cpu="1"), initContainers=[sidecar])
    during = pod(asks(cpu="1"), initContainers=[sidecar, asks(cpu="1500m")])

    assert requests_of(beside) == PodRequests("n", 1300, 0)
    assert requests_of(during) == PodRequests("n", 1800, 0)


def test_requests_of_the_whole_pod_and_overhead() -> None:
    whole = pod(
        asks(cpu="1"), resources={"requests": {"cpu": "3"}}, overhead={"cpu": "250m", "memory": "1Mi"}
    )

    assert requests_of(whole) == PodRequests("n", 3250, MIB)


@pytest.mark.parametrize("gone", [pod(asks(cpu="1"), phase="Succeeded"), pod(asks(cpu="1"), on="")])
def test_pods_that_have_ended_or_wait_hold_nothing(gone: dict[str, Any]) -> None:
    assert requests_of(gone) is None


def test_what_is_left_of_cpus_is_rounded_down_once() -> None:
    facts = facts_of(node("n", labels={}, allocatable={"cpu": "3920m", "memory": "8Gi"}), KubernetesConfig())
    assert facts.cpus == 3

    def held(cpu: str) -> int:
        counted = with_others(facts, held_on([requests_of(pod(asks(cpu=cpu)))])["n"])
        return 0 if counted.others is None else counted.others.cpus

    assert [held("920m"), held("921m"), held("1920m"), held("3921m"), held("9")] == [0, 1, 1, 3, 3]


def test_gpus_are_counted_by_the_profile_of_their_resource() -> None:
    whole = facts_of(DGX_H100, KubernetesConfig())
    sliced = facts_of(MIG_MIXED, KubernetesConfig())
    profile = next(gpu.profile for gpu in sliced.gpus if gpu.profile)
    by_name = {"name": "c", "resources": {"requests": {f"nvidia.com/mig-{profile}": "1", "cpu": "1"}}}
    pods = [requests_of(pod(asks(cpu="1", gpu="2"))), requests_of(pod(asks(gpu="1"))), None]

    assert with_others(whole, held_on(pods)["n"]).others == HeldByOthers(cpus=1, gpus={"": 3})
    there = with_others(sliced, requests_of(pod(by_name))).others
    assert there is not None
    assert there.gpus == {profile: 1}


def test_a_node_without_pods_of_others_stays_as_it_is() -> None:
    facts = facts_of(DGX_H100, KubernetesConfig())

    assert with_others(facts, None) is facts
    assert with_others(facts, requests_of(pod(asks()))) is facts
