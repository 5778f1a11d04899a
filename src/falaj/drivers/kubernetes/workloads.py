"""What Kueue says about the Workloads of attempts, kept current by one watch, as facts and sentences."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from falaj.drivers.kubernetes.client import ClusterClient, resource_of, translated
from falaj.drivers.kubernetes.watches import ObjectCache
from falaj.drivers.processes.diagnosis.reasons import to_sentence
from falaj.errors import FalajError, NotFound
from falaj.ports.cluster.manifests import ObjectKind

GROUP, VERSION = "kueue.x-k8s.io", "v1beta2"
WORKLOAD = ObjectKind(GROUP, VERSION, "Workload", "workloads", namespaced=True)
LOCAL_QUEUE = ObjectKind(GROUP, VERSION, "LocalQueue", "localqueues", namespaced=True)
CLUSTER_QUEUE = ObjectKind(GROUP, VERSION, "ClusterQueue", "clusterqueues")
PRIORITY_CLASS = ObjectKind(GROUP, VERSION, "WorkloadPriorityClass", "workloadpriorityclasses")

NOT_SERVED = (
    f"the cluster does not serve {GROUP}: install Kueue and its definitions (CRDs), or set "
    'kubernetes.scheduler = "falaj"'
)
APPLY = "falaj queues apply --to kueue"


@dataclass(frozen=True)
class WorkloadFacts:
    """One Workload, and the name of the object that it stands for.

    `waits_for` says why its pods do not run; none once it is admitted. `evicted` says why Kueue took that back,
    while that is so, and `is_preempted` that it was for the Workload with the uid `preemptor`. It `is_blocked` if it
    waits because of its queue and not for quota.
    """

    name: str
    uid: str
    owner: str
    queue: str = ""
    cluster_queue: str | None = None
    waits_for: str | None = None
    is_blocked: bool = False
    evicted: str | None = None
    is_preempted: bool = False
    preemptor: str | None = None

    @property
    def is_admitted(self) -> bool:
        return self.waits_for is None


class Admissions(Protocol):
    """What the launcher asks about attempts that Kueue decides on."""

    def find(self, owner: str, *, namespace: str) -> WorkloadFacts | None:
        """Return the Workload of an object as last known; none if it has none yet."""
        ...

    def explain(self, owner: str, *, namespace: str, queue: str, priority_class: str) -> str:
        """Return why an object has not been admitted, from all objects that it depends on."""
        ...

    def owner_of(self, uid: str | None) -> str | None:
        """Return the object that the Workload of this uid stands for; none if it is not known."""
        ...


class KueueWorkloads:
    """The Workloads of a cluster; the watch begins at the first question."""

    def __init__(self, connect: Callable[[], ClusterClient]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._opened: tuple[ClusterClient, ObjectCache[WorkloadFacts]] | None = None
        self._version = object()
        self._by_owner: tuple[object, dict[tuple[str, str], WorkloadFacts]] = (None, {})

    def find(self, owner: str, *, namespace: str) -> WorkloadFacts | None:
        return self._known().get((namespace, owner))

    def explain(self, owner: str, *, namespace: str, queue: str, priority_class: str) -> str:
        found = self.find(owner, namespace=namespace)
        try:
            if found is None:
                return self._explain_absence(owner, namespace, queue, priority_class)
            if found.is_blocked:
                return self._explain_queue(found, namespace)
        except FalajError as error:
            return to_sentence(f"Kueue does not start it, and the reason cannot be read: {error.message}")
        return found.waits_for or "Kueue has admitted it"

    def owner_of(self, uid: str | None) -> str | None:
        return next((each.owner for each in self._known().values() if each.uid == uid), None)

    def close(self) -> None:
        if self._opened is not None:
            client, workloads = self._opened
            workloads.close()
            client.close()

    def _explain_absence(self, owner: str, namespace: str, queue: str, priority_class: str) -> str:
        """Return why an object has no Workload: something that it names is missing, or Kueue does not run."""
        client, cache = self._open()
        with translated("list the API groups"):
            served = client.served_groups()
        if GROUP not in served:
            return to_sentence(NOT_SERVED)
        if cache.fault is not None:
            return to_sentence(f"Kueue cannot be asked: {cache.fault.message}")
        if cache.known() is None:
            return "Kueue has not answered yet"
        if self._read(PRIORITY_CLASS, priority_class) is None:
            missing = f"WorkloadPriorityClass {priority_class} does not exist"
            return to_sentence(f"Kueue cannot take it: {missing}; {APPLY} creates it")
        if self._read(LOCAL_QUEUE, queue, namespace) is None:
            missing = f"LocalQueue {queue} does not exist in namespace {namespace}"
            return to_sentence(f"Kueue cannot take it: {missing}; {APPLY} creates it")
        return to_sentence(
            f"Kueue has made no Workload for {owner} in namespace {namespace}: its manager does not run, or does not "
            "manage this kind of objects (integrations.frameworks of its configuration)"
        )

    def _explain_queue(self, found: WorkloadFacts, namespace: str) -> str:
        """Return why a queue admits nothing, which the Workload itself does not say."""
        local = self._read(LOCAL_QUEUE, found.queue, namespace)
        if local is None:
            missing = f"LocalQueue {found.queue} does not exist in namespace {namespace}"
            return to_sentence(f"Kueue cannot admit it: {missing}; {APPLY} creates it")
        above = str((local.get("spec") or {}).get("clusterQueue"))
        cluster = self._read(CLUSTER_QUEUE, above)
        if cluster is None:
            missing = f"ClusterQueue {above} of LocalQueue {found.queue} does not exist"
            return to_sentence(f"Kueue cannot admit it: {missing}; {APPLY} creates it")
        for what, queue in ((f"ClusterQueue {above}", cluster), (f"LocalQueue {found.queue}", local)):
            policy = (queue.get("spec") or {}).get("stopPolicy") or "None"
            if policy != "None":
                return to_sentence(f"Kueue admits nothing: {what} is stopped (stopPolicy {policy})")
            active = condition(queue, "Active")
            if active.get("status") == "False":
                said = one_line(active.get("message")) or active.get("reason")
                return to_sentence(f"Kueue admits nothing: {what} is not active: {said}")
        return found.waits_for or "Kueue has not admitted it yet"

    def _read(self, kind: ObjectKind, name: str, namespace: str | None = None) -> Mapping[str, Any] | None:
        within: dict[str, Any] = {"namespace": namespace} if namespace else {}
        with contextlib.suppress(NotFound), translated(f"read {kind.kind} {name}"):
            return dict(self._open()[0].get(resource_of(kind), name, **within))
        return None

    def _known(self) -> dict[tuple[str, str], WorkloadFacts]:
        version, (of, by_owner) = self._version, self._by_owner
        if of is not version:
            known = self._open()[1].known()
            if known is None:
                return {}
            by_owner = {(namespace, each.owner): each for (namespace, _), each in known.items() if each.owner}
            self._by_owner = version, by_owner
        return by_owner

    def _open(self) -> tuple[ClusterClient, ObjectCache[WorkloadFacts]]:
        with self._lock:
            if self._opened is None:
                client = self._connect()
                self._opened = client, ObjectCache(client, WORKLOAD, workload_facts, on_change=self._changed)
            return self._opened

    def _changed(self) -> None:
        self._version = object()


def workload_facts(workload: Mapping[str, Any]) -> WorkloadFacts:
    """Return what a Workload says."""
    metadata, spec, status = workload["metadata"], workload.get("spec") or {}, workload.get("status") or {}
    owners = metadata.get("ownerReferences") or ()
    preempted, evicted = condition(workload, "Preempted"), explain_eviction(workload)
    is_preempted = evicted is not None and preempted.get("status") == "True"
    return WorkloadFacts(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        owner=next((each["name"] for each in owners if each.get("controller")), ""),
        queue=spec.get("queueName") or "",
        cluster_queue=(status.get("admission") or {}).get("clusterQueue"),
        waits_for=explain_wait(workload),
        is_blocked=is_blocked(workload),
        evicted=evicted,
        is_preempted=is_preempted,
        preemptor=preemptor_of(preempted.get("message")) if is_preempted else None,
    )


def condition(manifest: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return a condition of an object; empty if it has none of that type."""
    found: Iterable[Mapping[str, Any]] = (manifest.get("status") or {}).get("conditions") or ()
    return next((each for each in found if each.get("type") == kind), {})


def is_blocked(workload: Mapping[str, Any]) -> bool:
    """Return whether Kueue cannot admit a Workload because of its queue; versions of Kueue name that differently."""
    reserved = condition(workload, "QuotaReserved")
    is_named = reserved.get("reason") in ("Inadmissible", "Misconfigured", "Suspended")
    is_said = re.search(r"Queue \S+ (doesn't exist|is inactive)", one_line(reserved.get("message")))
    return reserved.get("status") == "False" and (is_named or is_said is not None)


def explain_wait(workload: Mapping[str, Any]) -> str | None:
    """Return why the pods of a Workload do not run; none once it is admitted."""
    spec, reserved = workload.get("spec") or {}, condition(workload, "QuotaReserved")
    if condition(workload, "Admitted").get("status") == "True":
        return None
    if spec.get("active") is False:
        why = one_line(condition(workload, "Evicted").get("message")) or "no reason given"
        name = workload["metadata"]["name"]
        return to_sentence(f"Kueue does not start it: its Workload {name} was deactivated: {why}")
    again = requeue_words(workload)
    if reserved.get("status") == "True":
        return to_sentence(
            f"Kueue has reserved quota for it, and waits for {pending_checks(workload)}{again}"
        )
    said = one_line(reserved.get("message"))
    if not said:
        return to_sentence(f"Kueue has not considered it yet{again}")
    if is_blocked(workload):
        return to_sentence(f"Kueue cannot admit it: {said}{again}")
    said = re.sub(r"couldn't assign flavors to pod set [-a-z0-9]+: ", "", said)
    if reserved.get("reason") == "ExceedsMaxQuota" or "maximum capacity" in said:
        return to_sentence(f"Kueue has too little quota for it even when all is idle: {said}{again}")
    return to_sentence(f"Kueue waits for quota: {said}{again}")


def explain_eviction(workload: Mapping[str, Any]) -> str | None:
    """Return why Kueue took back the admission of a Workload; none if it did not."""
    evicted = condition(workload, "Evicted")
    if evicted.get("status") != "True":
        return None
    said = one_line(evicted.get("message")) or evicted.get("reason") or "no reason given"
    verb = "preempted" if evicted.get("reason") == "Preempted" else "evicted"
    return f"Kueue {verb} it: {said}"


def preemptor_of(message: str | None) -> str | None:
    found = re.search(r"\(UID: ([-0-9a-f]{36})", message or "")
    return None if found is None else found[1]


def requeue_words(workload: Mapping[str, Any]) -> str:
    """Return when Kueue tries again, if it pauses after evictions."""
    state = (workload.get("status") or {}).get("requeueState") or {}
    if not state.get("requeueAt"):
        return ""
    count = int(state.get("count") or 1)
    times = "eviction" if count == 1 else "evictions"
    return f"; after {count} {times} it is tried again at {state['requeueAt']}"


def pending_checks(workload: Mapping[str, Any]) -> str:
    found = (workload.get("status") or {}).get("admissionChecks") or ()
    open_ones = [
        f"the admission check {each.get('name')}"
        + (f" ({one_line(each.get('message'))})" if each.get("message") else "")
        for each in found
        if each.get("state") != "Ready"
    ]
    return ", ".join(open_ones) or "its pods to be let in"


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())
