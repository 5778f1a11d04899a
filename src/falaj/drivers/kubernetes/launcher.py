"""Launches attempts at jobs as pods of a cluster.

The state of an attempt is on the platform's disk (`remote_attempt`): what to run, who claimed its nodes, and what the
workers reported. Pods are watched for what workers cannot report: that one waits, or was killed with its worker.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from falaj.drivers.kubernetes.cluster import PodCluster
from falaj.drivers.kubernetes.isolation.namespaces import LaunchNamespaces
from falaj.drivers.kubernetes.isolation.policies import job_policy
from falaj.drivers.kubernetes.pod_status import PodFacts
from falaj.drivers.kubernetes.pods import (
    ATTEMPT_ANNOTATION,
    PRIORITY_LABEL,
    QUEUE_LABEL,
    PodSettings,
    credentials,
    gpu_resources,
    metadata,
    namespace_for,
    object_name,
    split_attempt,
)
from falaj.drivers.kubernetes.remote_attempt import AttemptReports, Objects, RemoteAttempt, checked_result
from falaj.drivers.kubernetes.renderings import KINDS, RENDERINGS, SECRETS, Rendering, choose
from falaj.drivers.kubernetes.storage import explain_claim, require_disk
from falaj.drivers.kubernetes.workloads import GROUP, NOT_SERVED, Admissions, WorkloadFacts
from falaj.drivers.processes.attempt_folder import read_json, write_json
from falaj.drivers.processes.attempt_spec import AttemptSpec, SandboxSpec
from falaj.drivers.processes.diagnosis.reasons import to_sentence
from falaj.drivers.processes.frameworks.contracts import deciding_nodes
from falaj.drivers.processes.launcher import NAME_LIMIT, check_launch, check_nodes
from falaj.drivers.processes.tree_removal import remove_tree
from falaj.errors import Conflict, FalajError, InvalidInput, NotFound, Unavailable
from falaj.ports.launcher import AttemptState, AttemptUsage, Launch, PodImage, WorkerHost, fence_wait_s
from falaj.ports.sandbox import MachineFacts
from falaj.records.training.images import require_image

log = logging.getLogger("falaj.drivers.kubernetes")

IMAGE_PATIENCE_S = 120.0
"""An image that could not be pulled for so long fails the attempt."""
UNPLACED_PATIENCE_S = 120.0
"""An attempt of which a pod finds no room for so long, beside the grace of a pod that leaves, goes back to its queue:
someone else was faster."""
EXPLAIN_AFTER_S, EXPLAIN_EVERY_S = 5.0, 15.0
"""The cluster's events are read if no pod has appeared by then, and so often."""
SETTLED_NS = 100_000_000
"""A folder that has just changed may change again without another time: the kernel's clock is coarse."""
REPORT_WAIT_S = 10.0
"""A worker whose pod has ended reported before that; so long a report may be on its way."""
GONE_AFTER_S = 10.0
"""A pod that was not seen for so long is gone; the watch may be a little behind its worker."""
NO_POD = "the cluster has made no pod for it yet"
LONGEST_IMAGE = 400
ADMITTED = "Kueue has admitted it, and its pods start"
GONE = "its pod was deleted, and its worker did not report its end"


class KubernetesLauncher:
    """Runs attempts in pods, each in the namespace of its workspace. `root` holds the state of each attempt.

    `secret_of` returns what an attempt presents to the platform, `certificate` the PEM text that pods trust.
    `lease_left_s` returns for how long this home's controller is certainly in charge; after `fence_s` without a renewed
    lease workers stop by themselves. `admissions` is what Kueue says, if it decides when objects start.
    """

    def __init__(
        self,
        root: Path,
        cluster: PodCluster,
        settings: PodSettings,
        *,
        namespaces: LaunchNamespaces,
        objects: Literal["auto"] | Objects,
        secret_of: Callable[[str], str],
        certificate: Callable[[], str],
        lease_left_s: Callable[[], float],
        fence_s: float,
        clock: Callable[[], float] = time.monotonic,
        admissions: Admissions | None = None,
    ) -> None:
        self._root, self._cluster, self._settings = root.absolute(), cluster, settings
        self._namespaces = namespaces
        self._objects, self._secret_of, self._certificate = objects, secret_of, certificate
        self._lease_left_s, self._fence_s, self._clock = lease_left_s, fence_s, clock
        self._admissions = admissions
        self._since: dict[tuple[str, str], float] = {}
        self._reports: dict[str, tuple[int, AttemptReports]] = {}
        self._absences: dict[str, tuple[float, str]] = {}
        self._images: dict[str, str] = {}

    def worker_host(self, attempt: str) -> WorkerHost:
        """Return what the workers of an attempt fetch from and report to."""
        return self._attempt(attempt)

    # -------------------------------------------------------------------------------------------- starting

    def start(self, launch: Launch) -> None:
        attempt = self._attempt(launch.attempt)
        if attempt.created_file.exists():
            return
        check_for_pods(launch, self._settings)
        check_launch(launch)  # before the cluster is asked
        namespace = namespace_for(launch, self._settings)
        if self._admissions is not None and GROUP not in self._cluster.served_groups():
            raise Unavailable(NOT_SERVED)
        kind: Objects = attempt.objects() or choose(self._objects, served=self._served())
        rendering = RENDERINGS[kind]
        peers = rendering.peers(launch) if launch.nodes > 1 else ()
        meeting = replace(launch, peers=peers)
        check_nodes(meeting)
        if not attempt.launch_file.exists():
            deciding = deciding_nodes(meeting) if peers else [0]
            noted = {"image": launch.image or self._settings.image}
            attempt.prepare(
                to_json(meeting) | noted,
                launch.directory,
                objects=kind,
                namespace=namespace,
                deciding=deciding,
            )
        self._namespaces.ensure_for(launch.labels["workspace"])
        for claim in sorted({str(volume.claim) for volume in launch.volumes}):
            if (missing := explain_claim(self._cluster, claim, namespace=namespace)) is not None:
                raise Unavailable(missing)
        try:
            self._create(launch, rendering)
        except NotFound as error:  # the namespace: it was deleted meanwhile
            self._namespaces.forget(namespace)
            raise Unavailable(f"{error.message}; it is made again") from error
        write_json(attempt.created_file, {"created_at": time.time()})

    def _create(self, launch: Launch, rendering: Rendering) -> None:
        """Create the objects of an attempt, of which some may be there already."""
        secret = credentials(
            launch,
            self._settings,
            secret=self._secret_of(launch.attempt),
            certificate=self._certificate(),
        )
        self._cluster.create(secret)
        owner = [self._cluster.create(each) for each in rendering.render(launch, self._settings)][-1]
        if owner["metadata"].get("annotations", {}).get(ATTEMPT_ANNOTATION) != launch.attempt:
            raise Conflict(
                f"{owner['kind']} {owner['metadata']['name']} exists, and belongs to another attempt"
            )
        self._cluster.adopt(secret, owner)
        for each in rendering.dependents(launch, self._settings, owner):
            self._cluster.create(each)
        if launch.nodes > 1:
            job, _ = split_attempt(launch.attempt)
            self._cluster.create(job_policy(metadata(launch, self._settings, owner=owner), job))

    def _served(self) -> frozenset[str]:
        return self._cluster.served_groups() if self._objects == "auto" else frozenset()

    # --------------------------------------------------------------------------------------------- its state

    def state(self, attempt: str) -> AttemptState:
        found = self._attempt(attempt)
        known = self._known_reports(attempt, found)
        if known.verdict is not None:
            return self._placed(attempt, known, evicted_as(state_of(known.verdict), known.eviction))
        if not known.claims and not known.is_created:
            return AttemptState("unknown")
        if len(known.results) == known.nodes:
            state = combined(known.counting())
            eviction = known.eviction
            if state.evicted is not None and eviction is None:
                eviction = self._note_deletion(attempt, found, state.evicted)
            return self._placed(attempt, known, evicted_as(state, eviction))
        if known.is_decided:  # the others are being stopped
            is_late = self._lasts_s(attempt, "decided", True) >= REPORT_WAIT_S
            state = combined(known.counting()) if is_late else AttemptState("running")
        else:
            state = self._unfinished(attempt, found, known.claims, known.results)
        if known.claims and known.eviction is None:
            self._note_eviction(attempt, found)
        return self._placed(attempt, known, evicted_as(state, known.eviction))

    def _placed(self, attempt: str, known: AttemptReports, state: AttemptState) -> AttemptState:
        """Return the state with the nodes on which the pods run, where the cluster chose them."""
        if self._admissions is None or not known.claims:
            return state
        pods = {pod.node_rank: pod.node for pod in holders(self._cluster.pods(attempt) or (), known.claims)}
        hosts = tuple(node for _, node in sorted(pods.items()) if node is not None)
        return replace(state, hosts=hosts)

    def _note_eviction(self, attempt: str, found: RemoteAttempt) -> None:
        """Record once why Kueue evicts an attempt that runs; its worker is told to end by the cluster."""
        workload = self._workload(attempt, found)
        if workload is None or workload.evicted is None:
            return
        winner = self._admissions.owner_of(workload.preemptor) if self._admissions is not None else None
        why = f"{workload.evicted}{'; it made room for ' + winner if winner else ''}"
        write_json(found.eviction_file, {"evicted": to_sentence(why), "preempted": workload.is_preempted})

    def _note_deletion(self, attempt: str, found: RemoteAttempt, evicted: str) -> Mapping[str, Any] | None:
        """Record once why the cluster told the pods of an attempt to end: because someone deleted their object."""
        try:
            noted = {"evicted": self._explain_deletion(attempt, found) or evicted, "preempted": False}
        except FalajError:  # the cluster is away; its end is recorded all the same
            return None
        write_json(found.eviction_file, noted)
        return noted

    def _explain_deletion(self, attempt: str, found: RemoteAttempt) -> str | None:
        """Return that the object of an attempt was deleted; none if it is there."""
        name, (api_version, kind) = object_name(attempt), KINDS[found.objects() or "job"][0]
        owner = self._cluster.find(api_version, kind, name, namespace=found.namespace)
        is_there = owner is not None and not owner["metadata"].get("deletionTimestamp")
        return None if is_there else f"its {kind} {name} was deleted"

    def _workload(self, attempt: str, found: RemoteAttempt) -> WorkloadFacts | None:
        """Return the Workload of an attempt; none if the platform decides, or if there is none yet."""
        if self._admissions is None:
            return None
        return self._admissions.find(object_name(attempt), namespace=found.namespace)

    def _known_reports(self, attempt: str, found: RemoteAttempt) -> AttemptReports:
        """Return what was reported. It is read again only if the folder has changed: an attempt is often looked at."""
        try:
            version = found.folder.stat().st_mtime_ns
        except FileNotFoundError:
            return AttemptReports()
        read_at, known = self._reports.get(attempt, (-1, AttemptReports()))
        is_settled = time.time_ns() - version > SETTLED_NS
        if version != read_at:
            known = found.reports()
            self._reports[attempt] = version if is_settled else -1, known
        return known

    def _unfinished(
        self,
        attempt: str,
        found: RemoteAttempt,
        claims: Mapping[int, Mapping[str, Any]],
        results: Mapping[int, Mapping[str, Any]],
    ) -> AttemptState:
        """Return the state of an attempt of which not all nodes have reported their end."""
        since = min((float(each["claimed_at"]) for each in claims.values()), default=0.0)
        running = AttemptState("running" if claims else "starting", started_at=moment(since))
        if not claims and found.stop_file.exists():
            return self._conclude(found, reason="It was stopped on request before it started", signal=15)
        known = self._cluster.pods(attempt)
        if known is None or not self._cluster.is_current():
            return running
        pods = {pod.node_rank: pod for pod in holders(known, claims)}
        self._note_image(attempt, found, pods.values())
        for rank, pod in pods.items():
            if (given_up := self._unplaced(attempt, found, rank, pod)) is not None:
                return given_up
        if not claims:
            return self._waiting(attempt, found, pods)
        silent = [rank for rank in range(found.nodes) if rank not in results]
        for rank in silent:
            ended = self._end_of_node(attempt, found, rank, claims.get(rank), pods.get(rank))
            if ended is not None:
                return ended
        return running

    def _unplaced(self, attempt: str, found: RemoteAttempt, rank: int, pod: PodFacts) -> AttemptState | None:
        """Return that an attempt is given up because the nodes that were chosen for it have no room; none while they
        may have."""
        is_unplaced = self._admissions is None and pod.node is None and pod.waits_for is not None
        patience_s = UNPLACED_PATIENCE_S + self._settings.grace_s
        if self._lasts_s(attempt, f"unplaced {rank}", is_unplaced) < patience_s or not is_unplaced:
            return None
        return self._conclude(found, reason=str(pod.waits_for), evicted=pod.waits_for)

    def image_of(self, attempt: str) -> PodImage:
        """Return the image of an attempt's pods, and what is known about what it is."""
        found = self._attempt(attempt)
        self._note_image(attempt, found, self._cluster.pods(attempt) or ())
        return found.image()

    def _note_image(self, attempt: str, found: RemoteAttempt, pods: Iterable[PodFacts]) -> None:
        """Record once which image the pods run: they may be gone when it is asked for."""
        ran = ", ".join(sorted({pod.image for pod in pods if pod.image}))[:LONGEST_IMAGE]
        if len(ran) > len(self._images.get(attempt, "")) and found.folder.exists():
            found.record_image(ran)
            self._images[attempt] = ran

    def _waiting(self, attempt: str, found: RemoteAttempt, pods: Mapping[int, PodFacts]) -> AttemptState:
        """Return the state before any worker has begun."""
        for rank, pod in pods.items():
            if self._lasts_s(attempt, f"ended {rank}", pod.has_ended) >= REPORT_WAIT_S:
                return self._conclude(found, reason=pod.fault or "Its pod ended early", evicted=pod.evicted)
            is_image = pod.waits_for is not None and "cannot be pulled" in pod.waits_for
            waited_s = self._lasts_s(attempt, f"image {rank}", is_image)
            if pod.is_hopeless or waited_s >= IMAGE_PATIENCE_S:
                return self._conclude(found, reason=f"It could not be started: {pod.waits_for}")
        waits = next((pod.waits_for for pod in pods.values() if pod.waits_for), None)
        workload = self._workload(attempt, found)
        if workload is not None and not workload.is_admitted and not pods:
            is_blocked = self._lasts_s(attempt, "blocked", workload.is_blocked) >= EXPLAIN_AFTER_S
            return self._explain_absence(attempt, found) if is_blocked else waiting_for(workload.waits_for)
        if self._lasts_s(attempt, "no pods", not pods) >= EXPLAIN_AFTER_S:
            return self._explain_absence(attempt, found)
        return waiting_for(waits or (ADMITTED if workload is not None else None))

    def _explain_absence(self, attempt: str, found: RemoteAttempt) -> AttemptState:
        """Return the state of an attempt without pods, from its object and the cluster's events, read seldom."""
        read_at, waits = self._absences.get(attempt, (float("-inf"), NO_POD))
        if self._clock() - read_at <= EXPLAIN_EVERY_S:
            return AttemptState("starting", reason=waits)
        name, (api_version, kind) = object_name(attempt), KINDS[found.objects() or "job"][0]
        failure, said, refusal = None, None, None
        with contextlib.suppress(FalajError):  # it is asked again
            owner = self._cluster.find(api_version, kind, name, namespace=found.namespace)
            failure = f"its {kind} {name} was deleted" if owner is None else failure_of(owner)
            said = self._cluster.explain(name, namespace=found.namespace)
            refusal = None if owner is None else self._explain_admission(name, owner)
        if failure is not None:
            why = f"{failure}: {said}" if said else failure
            return self._conclude(found, reason=to_sentence(why), evicted=why)
        waits = refusal or (f"the cluster has made no pod for it: {said}" if said else NO_POD)
        self._absences[attempt] = self._clock(), waits
        return AttemptState("starting", reason=waits)

    def _explain_admission(self, name: str, owner: Mapping[str, Any]) -> str | None:
        """Return why Kueue does not start an object; none once it has, or if the platform decides."""
        if self._admissions is None or not (owner.get("spec") or {}).get("suspend"):
            return None
        labels = owner["metadata"].get("labels") or {}
        queue, priority = labels.get(QUEUE_LABEL, ""), labels.get(PRIORITY_LABEL, "")
        namespace = owner["metadata"]["namespace"]
        return self._admissions.explain(name, namespace=namespace, queue=queue, priority_class=priority)

    def _end_of_node(
        self,
        attempt: str,
        found: RemoteAttempt,
        rank: int,
        claim: Mapping[str, Any] | None,
        pod: PodFacts | None,
    ) -> AttemptState | None:
        """Return how an attempt ended of which a node's worker did not report its end; none while it may."""
        ended_s = self._lasts_s(attempt, f"ended {rank}", pod is not None and pod.has_ended)
        if pod is not None:
            self._lasts_s(attempt, f"gone {rank}", False)
            if ended_s < REPORT_WAIT_S:
                return None
            if pod.result is not None:
                return self._take_message(found, rank, pod)
            reason = pod.fault or "Its pod ended without a result"
            return self._conclude(found, reason=reason, evicted=pod.evicted)
        gone_s = self._lasts_s(attempt, f"gone {rank}", claim is not None)
        if gone_s >= GONE_AFTER_S and not found.stop_file.exists():
            found.request_stop(0.0)  # it is told if it asks, and otherwise its lease runs out
        if gone_s >= GONE_AFTER_S + fence_wait_s(self._fence_s):
            why = GONE
            with contextlib.suppress(FalajError):
                deleted = self._explain_deletion(attempt, found)
                why = f"{deleted}, and its worker did not report its end" if deleted else GONE
            return self._conclude(found, reason=to_sentence(why), stopped=False, evicted=why)
        return None

    def _take_message(self, found: RemoteAttempt, rank: int, pod: PodFacts) -> AttemptState | None:
        """Take the result from the termination message, which the worker could not bring to the platform."""
        result = dict(pod.result or {})
        if result.get("exit_code") == 0 and not result.get("delivered"):
            lost = "its pod ended before its outputs had reached the platform"
            return self._conclude(found, reason=to_sentence(lost), evicted=pod.evicted or lost)
        found.end(rank, pod.uid, result)
        return None

    def _conclude(self, found: RemoteAttempt, *, reason: str, **facts: Any) -> AttemptState:
        """Record the end of an attempt that no worker reported. From now on its workers are refused."""
        claims = found.claims()
        started = min(
            (claim.get("claimed_at", time.time()) for claim in claims.values()), default=time.time()
        )
        facts = {"reason": reason, "stopped": found.stop_file.exists(), "started_at": started, **facts}
        verdict = {"phase": "lost" if claims else "ended", "ended_at": time.time(), **facts}
        found.close(verdict, unless_claimed=not claims)
        written = read_json(found.verdict_file)
        return AttemptState("running") if written is None else state_of(written)

    def _lasts_s(self, attempt: str, what: str, is_so: bool) -> float:
        """Return for how many seconds something has been so without a break, as far as it was asked."""
        if not is_so:
            self._since.pop((attempt, what), None)
            return 0.0
        return self._clock() - self._since.setdefault((attempt, what), self._clock())

    # ------------------------------------------------------------------------------------------- the others

    def stop(self, attempt: str, *, grace_s: float) -> None:
        found = self._attempt(attempt)
        if found.launch_file.exists() and self.state(attempt).phase in ("starting", "running"):
            found.request_stop(grace_s)

    def log(self, attempt: str, *, offset: int, limit: int) -> bytes:
        return self._attempt(attempt).read_log(offset=offset, limit=limit)

    def delete(self, attempt: str) -> None:
        found = self._attempt(attempt)
        objects, spec = found.objects(), read_json(found.launch_file)
        if objects is not None and spec is not None:
            alone = () if found.created_file.exists() else SECRETS  # it has no owner yet
            for api_version, kind in (*KINDS[objects], *alone):
                self._cluster.delete(api_version, kind, object_name(attempt), namespace=found.namespace)
            remove_tree(Path(spec["directory"]))
        if found.folder.exists():
            remove_tree(found.folder)
        for key in [each for each in list(self._since) if each[0] == attempt]:
            self._since.pop(key, None)
        self._absences.pop(attempt, None)
        self._reports.pop(attempt, None)
        self._images.pop(attempt, None)

    def sweep(self, keep: Callable[[str], bool]) -> list[str]:
        """Delete the objects of this home whose attempts `keep` does not want, and return those attempts."""
        removed: set[str] = set()
        refused: list[Unavailable] = []
        for namespace in self._namespaces.existing():
            try:
                removed |= set(self._sweep_namespace(namespace, keep))
            except Unavailable as error:  # the others are swept nevertheless
                refused.append(error)
        if refused:
            raise refused[0]
        return sorted(removed)

    def _sweep_namespace(self, namespace: str, keep: Callable[[str], bool]) -> Iterator[str]:
        served = self._cluster.served_groups() | {"", "batch"}
        kinds = [each for kinds in (*KINDS.values(), SECRETS) for each in kinds]
        for api_version, kind in (each for each in kinds if each[0].rpartition("/")[0] in served):
            for name, notes in self._cluster.list_objects(api_version, kind, namespace=namespace):
                attempt = notes.get(ATTEMPT_ANNOTATION, "")
                if attempt and name == object_name(attempt) and not keep(attempt):
                    self._cluster.delete(api_version, kind, name, namespace=namespace)
                    yield attempt

    def _attempt(self, attempt: str) -> RemoteAttempt:
        name = quote(attempt, safe="")
        if not name.strip(".") or len(name) > NAME_LIMIT:
            allowed = f"1 to {NAME_LIMIT} characters, and not only dots"
            raise InvalidInput.at("attempt", given=attempt, allowed=allowed)
        return RemoteAttempt(self._root / name, self._lease_left_s)


def check_for_pods(launch: Launch, settings: PodSettings) -> None:
    """Raise InvalidInput for a launch that cannot run in pods, or that the administrator does not allow."""
    image = launch.image or settings.image
    require_image(image, rules=settings.images, own=image)
    if launch.network and not settings.has_egress:
        raise no_network()
    if launch.gpu_milli < 1000:
        raise InvalidInput.at(
            "gpus", given=f"{launch.gpu_milli / 1000:g} of a GPU", allowed="whole GPUs on Kubernetes"
        )
    if launch.nsys:
        raise InvalidInput.at("nsys", given="Nsight Systems", allowed="on one machine, not on Kubernetes")
    require_disk(launch.disk_bytes, settings.scratch_bytes)
    gpu_resources(launch)


def no_network() -> InvalidInput:
    """Return the error for a job that asks for the network where the configuration allows none."""
    return InvalidInput.at(
        "network",
        given="a job with the network",
        allowed="none: kubernetes.egress names no addresses that jobs may reach",
        fix='[kubernetes] egress = ["10.1.0.0/16"]',
    )


def to_json(launch: Launch) -> dict[str, Any]:
    """Return a launch as JSON, without secrets."""
    nothing = SandboxSpec("same-uid", MachineFacts(is_root=False, python=""))
    found: dict[str, Any] = AttemptSpec(launch, nothing, 0).to_json()["launch"]
    return found


def failure_of(owner: Mapping[str, Any]) -> str | None:
    """Return that an object will make no more pods, and why; none while it may."""
    for each in (owner.get("status") or {}).get("conditions") or ():
        if each.get("type") in ("Failed", "FailureTarget") and each.get("status") == "True":
            return f"its {owner.get('kind')} failed ({each.get('reason')}): {each.get('message')}"
    return None


def holders(pods: Iterable[PodFacts], claims: Mapping[int, Mapping[str, Any]]) -> Iterator[PodFacts]:
    """Yield the pods that count: of a claimed node the one that claimed it."""
    for pod in pods:
        if claims.get(pod.node_rank, {}).get("pod") in (None, pod.uid):
            yield pod


def waiting_for(reason: str | None) -> AttemptState:
    return AttemptState("starting", reason=reason)


def evicted_as(state: AttemptState, eviction: Mapping[str, Any] | None) -> AttemptState:
    """Return the state of an attempt that the cluster ended, with the reason that Kueue gave."""
    if eviction is None or state.evicted is None:
        return state
    return replace(state, evicted=str(eviction["evicted"]), preempted=eviction["preempted"] is True)


def combined(results: Iterable[Mapping[str, Any]]) -> AttemptState:
    """Return the state of an attempt from the results of all its nodes: the first failure counts."""
    found = sorted((checked_result(each) for each in results), key=lambda each: each["ended_at"])
    failed = [each for each in found if each["exit_code"] != 0]
    told = [each for each in failed if not each["stopped"]]
    first = next(iter([*told, *failed, *reversed(found)]))
    return AttemptState(
        "lost" if first["lost"] else "ended",
        exit_code=first["exit_code"],
        signal=first["signal"],
        reason=first["reason"],
        started_at=moment(min(each["started_at"] for each in found)),
        ended_at=moment(max(each["ended_at"] for each in found)),
        used=total_usage([each["used"] for each in found]),
        limits=tuple(first["limits"]),
        stopped=any(each["stopped"] for each in found) and not first["evicted"],
        fenced=any(each["fenced"] for each in found),
        evicted="the cluster told its pod to end" if any(each["evicted"] for each in found) else None,
    )


def total_usage(used: Sequence[Mapping[str, float]]) -> AttemptUsage:
    """Return what all nodes used together; none where one of them could not measure it."""

    def total(name: str) -> float | None:
        values = [each[name] for each in used if each.get(name) is not None]
        return sum(values) if len(values) == len(used) else None

    peak = total("peak_memory_bytes")
    return AttemptUsage(
        cpu_s=total("cpu_s"),
        peak_memory_bytes=None if peak is None else int(peak),
        cpu_energy_j=total("cpu_energy_j"),
        gpu_energy_j=total("gpu_energy_j"),
    )


def state_of(verdict: Mapping[str, Any]) -> AttemptState:
    return AttemptState(
        verdict["phase"],
        reason=verdict.get("reason"),
        signal=verdict.get("signal"),
        stopped=verdict.get("stopped", False),
        evicted=verdict.get("evicted"),
        started_at=moment(verdict.get("started_at")),
        ended_at=moment(verdict.get("ended_at")),
    )


def moment(seconds: float | None) -> datetime | None:
    return None if not seconds else datetime.fromtimestamp(seconds, UTC)
