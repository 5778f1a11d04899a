"""The pods of an attempt: their names, labels and template, the same for every kind of object. Pure."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from falaj.drivers.kubernetes.inventory.gpu_devices import resource_of_device
from falaj.drivers.kubernetes.storage import claim_mounts, pod_volumes
from falaj.errors import InvalidInput
from falaj.ports.launcher import Launch, OpenPlacement
from falaj.records.scheduling.cluster_names import dns_label, namespace_of
from falaj.records.scheduling.snapshot import priority_class

Manifest = dict[str, Any]

DOMAIN = "falaj.dev"
MANAGED_BY = {"app.kubernetes.io/managed-by": "falaj"}
HOME_LABEL, JOB_LABEL, ATTEMPT_LABEL = f"{DOMAIN}/home", f"{DOMAIN}/job", f"{DOMAIN}/attempt"
ATTEMPT_ANNOTATION = f"{DOMAIN}/attempt-name"
QUEUE_LABEL, PRIORITY_LABEL = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
REQUIRED_TOPOLOGY = "kueue.x-k8s.io/podset-required-topology"
PREFERRED_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"
ZONE, REGION, HOSTNAME = (
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "kubernetes.io/hostname",
)
KEEP_NODE = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
"""Annotations by which autoscalers do not remove the node of a pod that runs, to save money."""
NODE_RANK_LABEL = "batch.kubernetes.io/job-completion-index"
NETWORK_LABEL = f"{DOMAIN}/network"
"""Selects the pods of jobs that asked for the network."""
CONTAINER = "node"

LONGEST_NAME = 40
"""Controllers add up to 20 characters for the names of pods, which have at most 63."""
LONGEST_LABEL = 63
WORK = "/falaj"
CREDENTIALS = PurePosixPath("/var/run/falaj")
UID = 65532
OVERHEAD_BYTES = 128 << 20
"""Memory of the worker and the supervisor, beside that of the job."""
DEADLINE_MARGIN_S = 3600
"""The cluster itself ends a pod that outlived its job's time limit by so much."""


@dataclass(frozen=True)
class PodSettings:
    """What the pods of all attempts have in common.

    `prefix` begins the names of namespaces and of Kueue's priority classes, `agent_url` is how pods reach the
    controller (tls://HOST:PORT), `home` tells the objects of platforms on one cluster apart. A pod that the cluster
    evicts has `grace_s` to save a checkpoint. `tolerate` are the keys of the taints that pods tolerate. `images` are
    those that may run, by default `image`; `has_egress` is whether jobs can have a network. Where Kueue decides,
    `zones` maps values of the nodes' labels to zones of the platform, and `topology` names the labels by which gangs
    are placed. `scratch_bytes` is the disk space of a pod, from `scratch_class` unless that is none.
    """

    image: str
    prefix: str
    agent_url: str
    home: str
    grace_s: float = 60.0
    scheduler: str = "falaj"
    python: str = "python3"
    tolerate: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    has_egress: bool = False
    zones: Mapping[str, str] = field(default_factory=dict)
    topology: tuple[str, ...] = ()
    scratch_bytes: int | None = None
    scratch_class: str | None = None


def object_name(attempt: str) -> str:
    """Return the name of an attempt's objects: at most 40 of a-z, 0-9 and '-', different for each attempt."""
    plain = re.sub(r"[^a-z0-9]+", "-", attempt.lower()).strip("-")
    name = f"falaj-{plain.removeprefix('job-')}"
    if re.fullmatch(r"job_[0-9a-z]{26}/[0-9]{1,6}", attempt):
        return name
    digest = hashlib.sha256(attempt.encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9].rstrip('-')}-{digest}"


def label_value(text: str) -> str:
    """Return `text` as the value of a label: shortened, and other characters replaced."""
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:LONGEST_LABEL]
    return clean.strip("-_.")


def split_attempt(attempt: str) -> tuple[str, str]:
    job, _, number = attempt.rpartition("/")
    return job or attempt, number if job else ""


def attempt_labels(launch: Launch, settings: PodSettings) -> dict[str, str]:
    """Return the labels of all objects of an attempt, by which it is found again, and `kubectl get -L` shows it."""
    job, number = split_attempt(launch.attempt)
    shown = {f"{DOMAIN}/{name}": label_value(value) for name, value in launch.labels.items()}
    own = {
        HOME_LABEL: label_value(settings.home),
        JOB_LABEL: label_value(job),
        ATTEMPT_LABEL: label_value(number),
        "app.kubernetes.io/name": object_name(launch.attempt),
    }
    network = {NETWORK_LABEL: "allowed" if launch.network else "none"}
    return {name: value for name, value in shown.items() if value} | own | network | MANAGED_BY


def namespace_for(launch: Launch, settings: PodSettings) -> str:
    """Return the namespace of the attempt's workspace; InvalidInput if it has none any more."""
    workspace = launch.labels.get("workspace")
    if not workspace:
        raise InvalidInput.at(
            "workspace", given="none", allowed="a workspace that exists: its pods run there"
        )
    return namespace_of(workspace, prefix=settings.prefix)


def queue_label(launch: Launch, settings: PodSettings) -> dict[str, str]:
    """Return the labels by which Kueue admits the object that owns the pods; empty if the platform places them.

    LocalQueues and WorkloadPriorityClasses have these names in `falaj queues render`.
    """
    if settings.scheduler != "kueue":
        return {}
    priority = 0 if launch.open_placement is None else launch.open_placement.priority
    return {
        QUEUE_LABEL: dns_label(launch.labels.get("queue", "default"), limit=200),
        PRIORITY_LABEL: f"{settings.prefix}-{priority_class(priority)}",
    }


def suspended(settings: PodSettings) -> Manifest:
    """Return the part of a spec that lets Kueue start it."""
    return {"suspend": True} if settings.scheduler == "kueue" else {}


def metadata(launch: Launch, settings: PodSettings, *, owner: Mapping[str, Any] | None = None) -> Manifest:
    """Return the metadata of an object of the attempt; `owner` is the object that it goes away with."""
    made: Manifest = {
        "name": object_name(launch.attempt),
        "namespace": namespace_for(launch, settings),
        "labels": attempt_labels(launch, settings) | (queue_label(launch, settings) if owner is None else {}),
        "annotations": notes(launch),
    }
    return made if owner is None else made | {"ownerReferences": [owner_reference(owner)]}


def notes(launch: Launch) -> dict[str, str]:
    """Return what labels cannot hold."""
    return {ATTEMPT_ANNOTATION: launch.attempt} | {
        f"{DOMAIN}/{name}": value for name, value in launch.labels.items() if label_value(value) != value
    }


def owner_reference(owner: Mapping[str, Any]) -> Manifest:
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": False,
        "blockOwnerDeletion": False,
    }


def credentials(launch: Launch, settings: PodSettings, *, secret: str, certificate: str) -> Manifest:
    """Return the Secret with all that a pod may know: what it presents to the platform, and whom it may trust.

    It is created before its owner: a kubelet that does not find the Secret of a pod tries again only after a while.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(launch, settings),
        "type": "Opaque",
        "immutable": True,
        "stringData": {"secret": secret, "certificate": certificate},
    }


def pod_template(launch: Launch, settings: PodSettings, *, subdomain: str | None = None) -> Manifest:
    """Return the template of the attempt's pods; it satisfies the Pod Security Standard `restricted`."""
    spec: Manifest = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(settings.grace_s) + 15,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "fsGroup": UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container(launch, settings)],
        "volumes": pod_volumes(
            launch,
            secret=object_name(launch.attempt),
            scratch_bytes=settings.scratch_bytes,
            scratch_class=settings.scratch_class,
        ),
    }
    if launch.timeout_s is not None:
        spec["activeDeadlineSeconds"] = math.ceil(launch.timeout_s + launch.grace_s) + DEADLINE_MARGIN_S
    if subdomain is not None:
        spec["subdomain"] = subdomain
    if settings.tolerate and (launch.gpus or settings.scheduler == "falaj"):
        spec["tolerations"] = [{"key": key, "operator": "Exists"} for key in settings.tolerate]
    if launch.hosts and settings.scheduler == "falaj":
        spec["affinity"] = affinity(launch, settings)
    if launch.open_placement is not None and (limits := open_affinity(launch, settings)):
        spec["affinity"] = limits
    return {
        "metadata": {
            "labels": attempt_labels(launch, settings),
            "annotations": notes(launch) | KEEP_NODE | topology_request(launch, settings),
        },
        "spec": spec,
    }


def container(launch: Launch, settings: PodSettings) -> Manifest:
    mounts = {"work": WORK, "tmp": "/tmp", "shm": "/dev/shm"}  # noqa: S108 - volumes of the pod
    return {
        "name": CONTAINER,
        "image": launch.image or settings.image,
        "imagePullPolicy": "IfNotPresent",
        "command": [settings.python, "-P", "-m", "falaj.drivers.kubernetes.worker"],
        "env": environment(launch, settings),
        "resources": resources(launch),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            *({"name": name, "mountPath": path} for name, path in mounts.items()),
            {"name": "credentials", "mountPath": str(CREDENTIALS), "readOnly": True},
            *claim_mounts(launch),
        ],
    }


def environment(launch: Launch, settings: PodSettings) -> list[Manifest]:
    """Return what the worker needs to find the platform. Everything else it fetches from there."""
    job, number = split_attempt(launch.attempt)
    plain = {
        "FALAJ_AGENT": settings.agent_url,
        "FALAJ_AGENT_CERTIFICATE": str(CREDENTIALS / "certificate"),
        "FALAJ_AGENT_SECRET_FILE": str(CREDENTIALS / "secret"),
        "FALAJ_JOB": job,
        "FALAJ_ATTEMPT": number,
        "FALAJ_WORK": WORK,
        "FALAJ_EVICTION_GRACE_S": f"{settings.grace_s:g}",
    }
    named = [{"name": name, "value": value} for name, value in plain.items()]
    uid = {"fieldRef": {"fieldPath": "metadata.uid"}}
    rank = {"fieldRef": {"fieldPath": f"metadata.annotations['{NODE_RANK_LABEL}']"}}
    return [
        *named,
        {"name": "FALAJ_POD", "valueFrom": uid},
        {"name": "FALAJ_NODE_RANK", "valueFrom": rank},
    ]


def resources(launch: Launch) -> Manifest:
    """Return requests and limits of one node's pod. The cluster's scheduler counts what the job asked for."""
    requests: dict[str, str] = {"cpu": str(launch.cpus)}
    limits: dict[str, str] = {"cpu": str(launch.cpus)}
    if launch.memory_bytes is not None:
        requests["memory"] = str(launch.memory_bytes)
        limits["memory"] = str(launch.memory_bytes + OVERHEAD_BYTES)
    gpus = {name: str(count) for name, count in gpu_resources(launch).items()}
    return {"requests": requests | gpus, "limits": limits | gpus}


def gpu_resources(launch: Launch) -> dict[str, int]:
    """Return the resources whose units are the GPUs that the scheduler placed, and how many each pod needs.

    All pods of an attempt have one template. Raise InvalidInput if they would need different ones, or none will do.
    """
    size = math.ceil(len(launch.gpus) / max(1, launch.nodes))
    pods = [launch.gpus[at : at + size] for at in range(0, len(launch.gpus), size)] if size else []
    found = [Counter(resource_of_device(each) for each in gpus) for gpus in pods]
    if any(None in each for each in found):
        raise InvalidInput.at(
            "gpus",
            given="GPUs that only a DRA driver hands out",
            allowed="GPUs of a device plugin: pods ask for them by a resource like nvidia.com/gpu",
            fix="--avoid the labels of these nodes, or install NVIDIA's device plugin on them",
        )
    if any(each != found[0] for each in found):
        names = sorted({str(name) for each in found for name in each})
        raise InvalidInput.at(
            "gpus",
            given=f"nodes that offer them as {' and '.join(names)}",
            allowed="nodes with the same MIG strategy and sharing: all pods of a job ask for the same resource",
            fix="--pool, or a label that only such nodes have",
        )
    return {str(name): count for name, count in sorted(found[0].items(), key=str)} if found else {}


def affinity(launch: Launch, settings: PodSettings) -> Manifest:
    """Return that pods run on the nodes that the platform's scheduler chose, each on one of its own if it chose so."""
    hosts = sorted(set(launch.hosts))
    terms = [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [host]}]} for host in hosts
    ]
    made: Manifest = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    }
    return made | (apart(launch, settings) if len(hosts) == launch.nodes > 1 else {})


def apart(launch: Launch, settings: PodSettings) -> Manifest:
    """Return that each pod of the attempt runs on a node of its own."""
    labels = attempt_labels(launch, settings)
    same = {"matchLabels": {name: labels[name] for name in (JOB_LABEL, ATTEMPT_LABEL)}}
    term = {"labelSelector": same, "topologyKey": HOSTNAME}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def open_affinity(launch: Launch, settings: PodSettings) -> Manifest:
    """Return where pods may run that the cluster places: in the zones and on the nodes that the job is limited to."""
    limits = launch.open_placement or OpenPlacement()
    in_zones = zone_terms(limits.zones, settings.zones)
    on_nodes = [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]}
        for name in limits.machines
    ]
    terms = [place | node for place in in_zones for node in on_nodes] or in_zones or on_nodes
    made: Manifest = {}
    if terms:
        made["nodeAffinity"] = {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}
        }
    return made | (apart(launch, settings) if limits.spread and launch.nodes > 1 else {})


def zone_terms(permitted: tuple[str, ...] | None, zones: Mapping[str, str]) -> list[Manifest]:
    """Return node selector terms for the `permitted` zones; none where all are, or where nodes are in the only one.

    As for the inventory, the label for the zone counts, and that for the region where it maps to none.
    """
    if permitted is None or not zones:
        return []
    allowed = sorted(value for value, zone in zones.items() if zone in permitted)
    if not allowed:
        return [{"matchExpressions": [{"key": ZONE, "operator": "In", "values": ["none"]}, NOWHERE]}]
    mapped = {"key": ZONE, "operator": "NotIn", "values": sorted(zones)}
    by_zone = {"key": ZONE, "operator": "In", "values": allowed}
    by_region = {"key": REGION, "operator": "In", "values": allowed}
    return [{"matchExpressions": [by_zone]}, {"matchExpressions": [by_region, mapped]}]


NOWHERE = {"key": ZONE, "operator": "DoesNotExist"}
"""Together with a value of the same label it holds for no node."""


def topology_request(launch: Launch, settings: PodSettings) -> dict[str, str]:
    """Return by which label Kueue keeps a gang together: on one fabric at any rate, else as far as there is room."""
    limits, levels = launch.open_placement, [each for each in settings.topology if each != HOSTNAME]
    if limits is None or not levels or launch.nodes == 1:
        return {}
    return {REQUIRED_TOPOLOGY if limits.together else PREFERRED_TOPOLOGY: levels[-1]}
