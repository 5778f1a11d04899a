"""Several clusters as one: each attempt, and each node, in its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from falaj.drivers.kubernetes.launcher import KubernetesLauncher
from falaj.drivers.kubernetes.maintenance import KubernetesMaintenance
from falaj.drivers.processes.attempt_folder import read_json, write_json
from falaj.errors import InvalidInput, NotFound, Unavailable
from falaj.ports.cluster.maintenance import CordonNote, Uncordoned
from falaj.ports.launcher import AttemptState, Launch, PodImage, WorkerHost
from falaj.records.scheduling.hardware import NodePod

CLUSTER_FILE = "cluster.json"
"""In the folder of an attempt: the cluster in which it was started."""


class RoutedLauncher:
    """Starts attempts in the cluster of the nodes that they were placed on, by the launchers of all clusters.

    All launchers have the same `root`, so that what is on the platform's disk is found whichever is asked. An attempt
    whose cluster is no longer configured is left to the first: it finds no pods there, and gives the attempt up when
    its lease has run out.
    """

    def __init__(self, root: Path, launchers: Mapping[str, Callable[[], KubernetesLauncher]]) -> None:
        self._root, self._launchers = root.absolute(), launchers
        self._known: dict[str, str] = {}

    def start(self, launch: Launch) -> None:
        cluster, hosts = split_hosts(launch.hosts, self._launchers)
        folder = self._folder(launch.attempt)
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(folder / CLUSTER_FILE, {"cluster": cluster})
        self._known[launch.attempt] = cluster
        self._launchers[cluster]().start(replace(launch, hosts=hosts))

    def state(self, attempt: str) -> AttemptState:
        return self._for(attempt).state(attempt)

    def stop(self, attempt: str, *, grace_s: float) -> None:
        self._for(attempt).stop(attempt, grace_s=grace_s)

    def log(self, attempt: str, *, offset: int, limit: int) -> bytes:
        return self._for(attempt).log(attempt, offset=offset, limit=limit)

    def delete(self, attempt: str) -> None:
        self._for(attempt).delete(attempt)
        self._known.pop(attempt, None)

    def worker_host(self, attempt: str) -> WorkerHost:
        return self._for(attempt).worker_host(attempt)

    def image_of(self, attempt: str) -> PodImage:
        return self._for(attempt).image_of(attempt)

    def sweep(self, keep: Callable[[str], bool]) -> list[str]:
        """Delete what is left in all clusters; a cluster that does not answer keeps no other from being swept."""
        removed: set[str] = set()
        refused: list[Unavailable] = []
        for launcher in self._launchers.values():
            try:
                removed |= set(launcher().sweep(keep))
            except Unavailable as error:
                refused.append(error)
        if refused:
            raise refused[0]
        return sorted(removed)

    def _for(self, attempt: str) -> KubernetesLauncher:
        cluster = self._known.get(attempt)
        if cluster is None:
            folder = self._folder(attempt)
            noted = None if folder is None else read_json(folder / CLUSTER_FILE)
            if noted is not None:
                cluster = self._known[attempt] = str(noted["cluster"])
        first = next(iter(self._launchers.values()))
        return self._launchers.get(cluster or "", first)()

    def _folder(self, attempt: str) -> Path | None:
        """Return the folder of an attempt; none for what its launcher refuses as a name."""
        name = quote(attempt, safe="")
        return self._root / name if name.strip(".") and len(name) < 256 else None


def split_hosts(hosts: Sequence[str], clusters: Mapping[str, object]) -> tuple[str, tuple[str, ...]]:
    """Return the cluster of some nodes, and their names there; InvalidInput if they are not all in one."""
    split = [host.partition(".") for host in hosts]
    names = {name for name, _, _ in split}
    if len(names) != 1 or not names <= clusters.keys():
        raise InvalidInput.at(
            "hosts", given=", ".join(hosts) or "none", allowed=f"nodes of one cluster: {', '.join(clusters)}"
        )
    return names.pop(), tuple(host for _, _, host in split)


class RoutedMaintenance:
    """Cordons, labels and reads nodes of several clusters, each in its own."""

    def __init__(self, clusters: Mapping[str, KubernetesMaintenance]) -> None:
        self._clusters = clusters

    def cordon(self, node: str, note: CordonNote) -> None:
        there, name = self._for(node)
        there.cordon(name, note)

    def uncordon(self, node: str) -> Uncordoned:
        there, name = self._for(node)
        return there.uncordon(name)

    def pods(self, node: str) -> list[NodePod]:
        there, name = self._for(node)
        return there.pods(name)

    def label(self, node: str, labels: Mapping[str, str | None]) -> None:
        there, name = self._for(node)
        there.label(name, labels)

    def close(self) -> None:
        for each in self._clusters.values():
            each.close()

    def _for(self, node: str) -> tuple[KubernetesMaintenance, str]:
        cluster, _, name = node.partition(".")
        if cluster not in self._clusters:
            raise NotFound(f"node {node} is in none of the clusters {', '.join(self._clusters)}")
        return self._clusters[cluster], name
