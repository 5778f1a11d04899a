"""Placeholder pods: pending ones by which the cluster autoscaler or Karpenter sees what the queue waits for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from falaj.drivers.kubernetes.cluster import PodCluster
from falaj.drivers.kubernetes.inventory.gpu_devices import resource_of_device
from falaj.drivers.kubernetes.isolation.namespaces import LaunchNamespaces
from falaj.drivers.kubernetes.pods import (
    DOMAIN,
    HOME_LABEL,
    HOSTNAME,
    MANAGED_BY,
    UID,
    Manifest,
    PodSettings,
    label_value,
    object_name,
)
from falaj.errors import FalajError
from falaj.ports.cluster.placeholders import PlaceholderPods
from falaj.records.scheduling.cluster_names import namespace_of

JOB = "batch/v1", "Job"
FOR_LABEL = f"{DOMAIN}/scale-up-for"
"""The job that waits; without the label of its own pods, so that no one takes placeholders for them."""
MAY_GO = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"}
LIST_EVERY_S = 60.0
"""What others deleted, and what ended by itself, is made again after so long."""
LONGEST_S = 1800
"""Placeholders end by themselves after so long: a platform that is gone asks for nothing."""
SLEEP = "import signal; signal.pause()"


class KubernetesPlaceholders:
    """Keeps a Job of idle pods for each waiting job, in the namespace of its workspace.

    None while the cluster finds no node for a pod of a job that was placed: a placeholder may be what is on its node,
    and the pod that waits asks autoscalers itself.
    """

    def __init__(
        self,
        cluster: PodCluster,
        settings: PodSettings,
        namespaces: LaunchNamespaces,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._settings, self._namespaces, self._clock = cluster, settings, namespaces, clock
        self._made: dict[tuple[str, str], PlaceholderPods | None] = {}
        self._listed_at = float("-inf")

    def keep(self, wanted: Sequence[PlaceholderPods]) -> None:
        if self._clock() - self._listed_at >= LIST_EVERY_S and (wanted or self._made or not self._listed):
            self._list()
        if wanted and self._cluster.lacks_room():
            wanted = ()
        prefix = self._settings.prefix
        named = {(namespace_of(each.workspace, prefix=prefix), name_for(each.job)): each for each in wanted}
        refused: list[FalajError] = []
        for key in [key for key, made in self._made.items() if made is None or named.get(key) != made]:
            self._attempt(refused, partial(self._remove, *key))
        for key, each in named.items():
            if key not in self._made:
                self._attempt(refused, partial(self._make, key, each))
        if refused:
            raise refused[0]

    @property
    def _listed(self) -> bool:
        return self._listed_at > float("-inf")

    def _attempt(self, refused: list[FalajError], change: Callable[[], None]) -> None:
        try:
            change()
        except FalajError as error:  # the others are kept nevertheless
            refused.append(error)

    def _list(self) -> None:
        """Find what is there: also what an earlier controller made, or made differently."""
        found = {
            (namespace, each.name)
            for namespace in self._namespaces.existing()
            for each in self._cluster.list_objects(*JOB, namespace=namespace)
            if each.annotations.get(FOR_LABEL)
        }
        self._made = {key: self._made.get(key) for key in found}
        self._listed_at = self._clock()

    def _make(self, key: tuple[str, str], each: PlaceholderPods) -> None:
        self._namespaces.ensure_for(each.workspace)
        self._cluster.create(placeholder_job(each, key[0], self._settings))
        self._made[key] = each

    def _remove(self, namespace: str, name: str) -> None:
        self._cluster.delete(*JOB, name, namespace=namespace)
        self._made.pop((namespace, name), None)


def name_for(job: str) -> str:
    return object_name(f"more/{job}")


def placeholder_job(each: PlaceholderPods, namespace: str, settings: PodSettings) -> Manifest:
    """Return a Job whose pods have the requests of the waiting job's, and do nothing."""
    labels = {**MANAGED_BY, HOME_LABEL: label_value(settings.home), FOR_LABEL: label_value(each.job)}
    return {
        "apiVersion": JOB[0],
        "kind": JOB[1],
        "metadata": {
            "name": name_for(each.job),
            "namespace": namespace,
            "labels": labels,
            "annotations": {FOR_LABEL: each.job},
        },
        "spec": {
            "parallelism": each.pods,
            "completions": each.pods,
            "backoffLimit": 0,
            "activeDeadlineSeconds": LONGEST_S,
            "ttlSecondsAfterFinished": 0,
            "template": {"metadata": {"labels": labels, "annotations": MAY_GO}, "spec": _pod(each, settings)},
        },
    }


def _pod(each: PlaceholderPods, settings: PodSettings) -> Manifest:
    amounts = _requests(each)
    spec: Manifest = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [{"key": key, "operator": "Exists"} for key in settings.tolerate],
        "nodeSelector": dict(each.selector),
        "containers": [
            {
                "name": "placeholder",
                "image": settings.image,
                "imagePullPolicy": "IfNotPresent",
                "command": [settings.python, "-c", SLEEP],
                "resources": {"requests": amounts, "limits": amounts},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "runAsNonRoot": True,
                    "capabilities": {"drop": ["ALL"]},
                },
            }
        ],
    }
    if each.spread and each.pods > 1:
        alike = {
            "labelSelector": {"matchLabels": {FOR_LABEL: label_value(each.job)}},
            "topologyKey": HOSTNAME,
        }
        apart = {"requiredDuringSchedulingIgnoredDuringExecution": [alike]}
        spec["affinity"] = {"podAntiAffinity": apart}
    return spec


def _requests(each: PlaceholderPods) -> dict[str, str]:
    memory = {"memory": str(each.memory_bytes)} if each.memory_bytes else {}
    return {"cpu": str(each.cpus)} | memory | _gpu_requests(each.gpus)


def _gpu_requests(devices: Iterable[str]) -> dict[str, str]:
    found = Counter(name for device in devices if (name := resource_of_device(device)) is not None)
    return {name: str(count) for name, count in sorted(found.items())}
