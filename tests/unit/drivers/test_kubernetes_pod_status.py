"""What the cluster says about pods, as the sentences that people read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from falaj.drivers.kubernetes.pod_status import PodFacts, pod_facts

RESULT = {"exit_code": 0, "delivered": True}


def pod(phase: str, *, state: dict[str, Any] | None = None, conditions: Any = (), **status: Any) -> PodFacts:
    containers = [] if state is None else [{"name": "node", "imageID": "sha256:1", "state": state}]
    return pod_facts(
        {
            "metadata": {
                "uid": "u1",
                "annotations": {
                    "falaj.dev/attempt-name": "job_1/2",
                    "batch.kubernetes.io/job-completion-index": "3",
                },
            },
            "spec": {"nodeName": "node-0", "containers": [{"image": "worker:1"}]},
            "status": {
                "phase": phase,
                "containerStatuses": containers,
                "conditions": list(conditions),
                **status,
            },
        }
    )


def test_a_running_pod_is_known_by_its_attempt_and_its_node() -> None:
    found = pod("Running", state={"running": {}})

    assert (found.attempt, found.node_rank, found.uid, found.node) == ("job_1/2", 3, "u1", "node-0")
    assert (found.has_ended, found.fault, found.waits_for, found.image) == (False, None, None, "sha256:1")


@pytest.mark.parametrize(
    ("reason", "message", "is_hopeless", "words"),
    [
        (
            "ImagePullBackOff",
            "no such host",
            False,
            "Its image worker:1 cannot be pulled (ImagePullBackOff): no such",
        ),
        ("InvalidImageName", "bad", True, "Its image worker:1 cannot be used (InvalidImageName): bad"),
        (
            "CreateContainerError",
            "no entry",
            True,
            "Its container cannot be started (CreateContainerError): no entry",
        ),
        (
            "CreateContainerConfigError",
            "secret x",
            False,
            "Its container does not start yet (CreateContainerConfigE",
        ),
        ("ContainerCreating", "", False, None),
    ],
)
def test_a_pod_that_does_not_start_says_why(
    reason: str, message: str, is_hopeless: bool, words: str | None
) -> None:
    found = pod("Pending", state={"waiting": {"reason": reason, "message": message}})

    assert found.is_hopeless is is_hopeless
    assert (found.waits_for or "").startswith(words) if words else found.waits_for is None


def test_a_pod_that_fits_nowhere_says_so() -> None:
    message = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}

    assert pod("Pending", conditions=[condition]).waits_for == f"The cluster cannot place its pod: {message}"


def test_an_evicted_pod_has_no_fault_of_its_own() -> None:
    disrupted = {"type": "DisruptionTarget", "status": "True", "message": "Eviction API: evicting"}
    drained = pod("Failed", conditions=[disrupted], state={"terminated": {"exitCode": 143}})
    starved = pod("Failed", reason="Evicted", message="The node was low on resource: memory.")

    assert (drained.fault, drained.evicted) == (None, "The cluster ended its pod: Eviction API: evicting")
    assert starved.evicted == "The cluster ended its pod (Evicted): The node was low on resource: memory."


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (
            {"exitCode": 137, "reason": "OOMKilled"},
            "Its pod ran out of memory, and the kernel killed it (OOMKilled)",
        ),
        ({"exitCode": 78, "reason": "Error"}, "Its worker ended with exit code 78"),
        (
            {"exitCode": 128, "reason": "StartError", "message": "exec: no python3"},
            "Its container could not be started: exec: no python3",
        ),
    ],
)
def test_a_failed_pod_says_why(ended: dict[str, Any], words: str) -> None:
    assert pod("Failed", state={"terminated": ended}).fault == words


@pytest.mark.parametrize("message", [None, "", "no json", "[1]", '{"falaj": 3}', "[" * 100_000])
def test_a_termination_message_of_others_is_no_result(message: str | None) -> None:
    assert pod("Succeeded", state={"terminated": {"exitCode": 0, "message": message}}).result is None


def test_the_result_is_in_the_termination_message() -> None:
    message = json.dumps({"falaj": RESULT})

    assert pod("Succeeded", state={"terminated": {"exitCode": 0, "message": message}}).result == RESULT
