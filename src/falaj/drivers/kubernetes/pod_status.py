"""What the cluster says about a pod of an attempt, as facts and sentences. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from falaj.drivers.kubernetes.pods import ATTEMPT_ANNOTATION, CONTAINER, NODE_RANK_LABEL
from falaj.drivers.processes.diagnosis.reasons import describe_exit, to_sentence

IMAGE_ERRORS = frozenset({"ErrImagePull", "ImagePullBackOff", "RegistryUnavailable"})
"""The kubelet tries these again."""
HOPELESS = frozenset(
    {
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "SignatureValidationFailed",
        "CreateContainerError",
        "RunContainerError",
    }
)
"""Nothing changes about these by waiting."""
NODE_SHORT = frozenset(
    {"OutOfcpu", "OutOfmemory", "OutOfpods", "OutOfnvidia.com/gpu", "UnexpectedAdmissionError"}
)
EVICTIONS = frozenset({"Evicted", "NodeShutdown", "Terminated", "Preempting", "NodeLost", "Shutdown"})


@dataclass(frozen=True)
class PodFacts:
    """One pod. `waits_for` says why its container does not run, and `is_hopeless` that it never will.

    `fault` says why it failed if it did, `evicted` why the cluster ended it, and `result` is what its worker left in
    the termination message. `is_ending` says that it was told to end.
    """

    attempt: str
    node_rank: int
    uid: str
    phase: str
    node: str | None = None
    waits_for: str | None = None
    is_hopeless: bool = False
    is_ending: bool = False
    fault: str | None = None
    evicted: str | None = None
    result: Mapping[str, Any] | None = None
    exit_code: int | None = None
    image: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


def pod_facts(pod: Mapping[str, Any]) -> PodFacts:
    """Return what is known about a pod from its object."""
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    found = metadata.get("annotations") or {}
    phase, state = status.get("phase") or "Pending", container_state(status)
    ended = state.get("terminated") or {}
    fault, evicted = explain_end(status, ended) if phase == "Failed" else (None, None)
    waits_for, hopeless = explain_wait(spec, status, state) if phase == "Pending" else (None, False)
    return PodFacts(
        attempt=found.get(ATTEMPT_ANNOTATION, ""),
        node_rank=int(found.get(NODE_RANK_LABEL) or 0),
        uid=metadata.get("uid", ""),
        phase=phase,
        node=spec.get("nodeName"),
        waits_for=waits_for,
        is_hopeless=hopeless,
        is_ending=metadata.get("deletionTimestamp") is not None,
        fault=fault,
        evicted=evicted,
        result=termination_result(ended.get("message")),
        exit_code=ended.get("exitCode"),
        image=image_of(status),
    )


def container_state(status: Mapping[str, Any]) -> Mapping[str, Any]:
    for each in status.get("containerStatuses") or ():
        if each.get("name") == CONTAINER:
            return each.get("state") or {}
    return {}


def image_of(status: Mapping[str, Any]) -> str | None:
    """Return the digest of the image that the pod runs, as far as the kubelet has reported it."""
    for each in status.get("containerStatuses") or ():
        if each.get("name") == CONTAINER:
            return each.get("imageID") or None
    return None


def termination_result(message: str | None) -> Mapping[str, Any] | None:
    """Return the result that the worker left in the termination message; none if it is not one."""
    try:
        found = json.loads(message or "")
    except (ValueError, RecursionError):
        return None
    result = found.get("falaj") if isinstance(found, dict) else None
    return result if isinstance(result, dict) else None


def explain_end(status: Mapping[str, Any], ended: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return why a pod failed, and why the cluster ended it, if it did; a pod that was evicted has no fault."""
    reason, message = status.get("reason"), " ".join((status.get("message") or "").split())
    for each in status.get("conditions") or ():
        if each.get("type") == "DisruptionTarget" and each.get("status") == "True":
            why = each.get("message") or each.get("reason") or "it was disrupted"
            return None, to_sentence(f"the cluster ended its pod: {why}")
    if reason in EVICTIONS:
        return None, to_sentence(f"the cluster ended its pod ({reason}): {message or 'no reason given'}")
    if reason in NODE_SHORT:
        return None, to_sentence(f"its node had no room for its pod: {message or reason}")
    if reason == "DeadlineExceeded":
        return "Its pod outlived its time limit, and the cluster ended it", None
    if ended.get("reason") == "OOMKilled":
        return "Its pod ran out of memory, and the kernel killed it (OOMKilled)", None
    if ended.get("reason") in ("StartError", "ContainerCannotRun"):
        return to_sentence(
            f"its container could not be started: {ended.get('message') or ended['reason']}"
        ), None
    if ended:
        how = describe_exit(ended.get("exitCode"), ended.get("signal") or None)
        said = (
            to_sentence(ended.get("message") or "")
            if termination_result(ended.get("message")) is None
            else ""
        )
        return to_sentence(f"its worker ended with {how}{': ' + said if said else ''}"), None
    return to_sentence(f"its pod failed: {message or reason or 'no reason given'}"), None


def explain_wait(
    spec: Mapping[str, Any], status: Mapping[str, Any], state: Mapping[str, Any]
) -> tuple[str | None, bool]:
    """Return what a pod waits for, and whether waiting is in vain."""
    waiting = state.get("waiting") or {}
    why, message = waiting.get("reason") or "", " ".join((waiting.get("message") or "").split())
    image = next((each.get("image") for each in spec.get("containers") or ()), "")
    if why in HOPELESS:
        what = f"its image {image} cannot be used" if "Image" in why else "its container cannot be started"
        return to_sentence(f"{what} ({why}): {message or 'no reason given'}"), True
    if why in IMAGE_ERRORS:
        return to_sentence(
            f"its image {image} cannot be pulled ({why}): {message or 'no reason given'}"
        ), False
    for each in status.get("conditions") or ():
        if each.get("type") == "PodScheduled" and each.get("status") == "False":
            said = " ".join((each.get("message") or each.get("reason") or "").split())
            return to_sentence(f"the cluster cannot place its pod: {said}"), False
    if message:
        return to_sentence(f"its container does not start yet ({why}): {message}"), False
    return None, False
