"""The states of attempts in pods, as the launcher derives them from reports and from the cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from falaj.drivers.kubernetes.cluster import FoundObject
from falaj.drivers.kubernetes.launcher import (
    EXPLAIN_AFTER_S,
    GONE,
    GONE_AFTER_S,
    IMAGE_PATIENCE_S,
    REPORT_WAIT_S,
    UNPLACED_PATIENCE_S,
    KubernetesLauncher,
)
from falaj.drivers.kubernetes.pod_status import PodFacts
from falaj.drivers.kubernetes.pods import PodSettings, object_name, owner_reference
from falaj.drivers.kubernetes.remote_attempt import Objects, RemoteAttempt
from falaj.drivers.kubernetes.workloads import Admissions, WorkloadFacts
from falaj.errors import Conflict, InvalidInput, NotFound, Unavailable
from falaj.ports.launcher import Launch, OpenPlacement, PodImage, VolumeMount, fence_wait_s

ATTEMPT = "job_1/1"
RESULT = {
    "exit_code": 0,
    "signal": None,
    "reason": None,
    "started_at": 10.0,
    "ended_at": 20.0,
    "used": {"cpu_s": 1.0, "peak_memory_bytes": 5},
    "limits": ["pids: counted"],
    "stopped": False,
    "fenced": False,
}
FENCE_S = 20.0


class FakeCluster:
    """Objects in memory; `fails_at` is the number of the request that the API server does not answer."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.found: list[PodFacts] | None = []
        self.current = True
        self.warning: str | None = None
        self.requests = 0
        self.fails_at = -1
        self.failure: Exception = Unavailable("the API server is away")
        self.groups = frozenset({"batch"})

    def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.requests += 1
        if self.requests == self.fails_at:
            raise self.failure
        name = manifest["metadata"]["name"]
        made = manifest | {"metadata": manifest["metadata"] | {"uid": f"uid-{len(self.objects)}"}}
        return self.objects.setdefault((manifest["kind"], name), made)

    def adopt(self, manifest: dict[str, Any], owner: dict[str, Any]) -> None:
        found = self.objects[manifest["kind"], manifest["metadata"]["name"]]
        found["metadata"]["ownerReferences"] = [owner_reference(owner)]

    def find(self, api_version: str, kind: str, name: str, *, namespace: str) -> dict[str, Any] | None:
        return self.objects.get((kind, name))

    def delete(self, api_version: str, kind: str, name: str, *, namespace: str) -> None:
        self.objects.pop((kind, name), None)

    def list_objects(self, api_version: str, kind: str, *, namespace: str) -> list[FoundObject]:
        found = [each["metadata"] for (of, _), each in self.objects.items() if of == kind]
        return [
            FoundObject(each["name"], each["annotations"]) for each in found if each["namespace"] == namespace
        ]

    def explain(self, name: str, *, namespace: str) -> str | None:
        return self.warning

    def served_groups(self) -> frozenset[str]:
        return self.groups

    def pods(self, attempt: str) -> list[PodFacts] | None:
        return None if self.found is None else [each for each in self.found if each.attempt == attempt]

    def is_current(self) -> bool:
        return self.current

    def lacks_room(self) -> bool:
        return False


class FakeNamespaces:
    """Namespaces that are there; `asked` are the workspaces that they were made for, `forgotten` what was deleted."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.forgotten: list[str] = []

    def ensure_for(self, workspace: str) -> str:
        self.asked.append(workspace)
        return f"falaj-{workspace}"

    def forget(self, namespace: str) -> None:
        self.forgotten.append(namespace)

    def existing(self) -> dict[str, str]:
        return {"falaj-risk": "risk", "falaj-fraud": "fraud"}


class Testbed:
    """A launcher on a fake cluster, with a clock that the test owns."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        self.folder, self.cluster, self.now = folder, FakeCluster(), 100.0
        self.namespaces = FakeNamespaces()
        self.settings = PodSettings("worker:1", "falaj", "tls://h:1", "home_1")
        self.admissions: Admissions | None = None
        self.launcher = self.another()

    def another(self, **settings: Any) -> KubernetesLauncher:
        """Return a new launcher, which has nothing in memory."""
        return KubernetesLauncher(
            self.folder / "state",
            self.cluster,
            replace(self.settings, **settings),
            namespaces=self.namespaces,
            objects="auto",
            secret_of=lambda attempt: f"secret of {attempt}",
            certificate=lambda: "PEM",
            lease_left_s=lambda: 10.0,
            fence_s=FENCE_S,
            clock=lambda: self.now,
            admissions=self.admissions,
        )

    def launch(self, **options: Any) -> Launch:
        directory = self.folder / "job"
        for part in ("code", "inputs", "outputs"):
            (directory / part).mkdir(parents=True, exist_ok=True)
        labels = options.pop("labels", {"workspace": "risk"})
        command = ["python3", "x.py"]
        return Launch(attempt=ATTEMPT, directory=directory, command=command, labels=labels, **options)

    def pod(self, phase: str, **facts: Any) -> PodFacts:
        made = PodFacts(attempt=ATTEMPT, node_rank=0, uid="u1", phase=phase, **facts)
        self.cluster.found = [made]
        return made


@pytest.fixture
def testbed(tmp_path: Path) -> Testbed:
    return Testbed(tmp_path)


def test_an_attempt_starts_runs_and_ends(testbed: Testbed) -> None:
    launcher = testbed.launcher
    assert launcher.state(ATTEMPT).phase == "unknown"

    launcher.start(testbed.launch())
    assert launcher.state(ATTEMPT).phase == "starting"
    worker = launcher.worker_host(ATTEMPT)
    worker.claim(0, "u1")
    testbed.pod("Running")
    assert launcher.state(ATTEMPT).phase == "running"
    worker.end(0, "u1", RESULT)

    for each in (launcher, testbed.another()):
        state = each.state(ATTEMPT)
        assert (state.phase, state.exit_code, state.stopped) == ("ended", 0, False)
        assert (state.used.cpu_s, state.used.peak_memory_bytes) == (1.0, 5)
    launcher.delete(ATTEMPT)
    assert launcher.state(ATTEMPT).phase == "unknown"
    assert not [name for kind, name in testbed.cluster.objects if kind == "Job"]


def test_the_image_that_pods_ran_is_known_after_they_are_gone(testbed: Testbed) -> None:
    pinned = f"localhost/vision@sha256:{'1' * 64}"
    testbed.launcher.start(testbed.launch(image="localhost/vision:1"))
    template = testbed.cluster.objects["Job", object_name(ATTEMPT)]["spec"]["template"]
    assert template["spec"]["containers"][0]["image"] == "localhost/vision:1"
    assert testbed.launcher.image_of(ATTEMPT).digest is None
    worker = testbed.launcher.worker_host(ATTEMPT)
    worker.claim(0, "u1")
    assert "image" not in worker.launch(0, "u1")
    testbed.pod("Running", image=pinned)
    testbed.launcher.state(ATTEMPT)
    worker.save_packages(0, "u1", iter([b"# Python 3.11\n", b"demo==1.0\n"]))

    testbed.cluster.found = []
    found = testbed.another().image_of(ATTEMPT)

    assert found == PodImage("localhost/vision:1", pinned, "# Python 3.11\ndemo==1.0\n")
    assert found.digest == pinned


def test_a_reference_by_digest_says_what_ran_before_the_cluster_does(testbed: Testbed) -> None:
    pinned = f"localhost/vision@sha256:{'1' * 64}"
    testbed.launcher.start(testbed.launch(image=pinned))

    assert testbed.launcher.image_of(ATTEMPT).digest == pinned
    assert testbed.launcher.image_of("job_2/1") == PodImage("")


def test_a_secret_without_an_owner_is_removed_with_its_attempt(testbed: Testbed) -> None:
    testbed.cluster.fails_at = 2
    with pytest.raises(Unavailable):
        testbed.launcher.start(testbed.launch())

    testbed.launcher.delete(ATTEMPT)

    assert not testbed.cluster.objects


def test_a_start_that_was_cut_short_is_repeated_and_makes_nothing_twice(testbed: Testbed) -> None:
    for request in (1, 2):
        testbed.cluster.fails_at = testbed.cluster.requests + request
        with pytest.raises(Unavailable):
            testbed.another().start(testbed.launch())
        assert testbed.launcher.state(ATTEMPT).phase == "unknown"

    testbed.another().start(testbed.launch())
    testbed.launcher.start(testbed.launch())

    assert [kind for kind, _ in testbed.cluster.objects] == ["Secret", "Job"]
    secret, job = testbed.cluster.objects.values()
    assert secret["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]


def test_an_object_of_another_attempt_is_not_taken(testbed: Testbed) -> None:
    other = {"kind": "Job", "metadata": {"name": object_name(ATTEMPT), "annotations": {}}}
    testbed.cluster.create(other)

    with pytest.raises(Conflict, match="belongs to another attempt"):
        testbed.launcher.start(testbed.launch())


def test_what_a_pod_waits_for_is_said(testbed: Testbed) -> None:
    testbed.launcher.start(testbed.launch())
    testbed.cluster.warning = 'pods "x" is forbidden: exceeded quota'
    assert testbed.launcher.state(ATTEMPT).reason is None
    testbed.now += EXPLAIN_AFTER_S

    assert testbed.launcher.state(ATTEMPT).reason == (
        'the cluster has made no pod for it: pods "x" is forbidden: exceeded quota'
    )
    testbed.pod("Pending", waits_for="The cluster cannot place its pod: 0/2 nodes are available")
    assert (
        testbed.launcher.state(ATTEMPT).reason == "The cluster cannot place its pod: 0/2 nodes are available"
    )


@pytest.mark.parametrize("is_deleted", [True, False])
def test_an_attempt_whose_object_makes_no_pods_any_more_is_queued_again(
    testbed: Testbed, is_deleted: bool
) -> None:
    testbed.launcher.start(testbed.launch())
    job = testbed.cluster.objects["Job", object_name(ATTEMPT)]
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "no retries"}
    job["status"] = {"conditions": [failed]}
    if is_deleted:
        testbed.cluster.delete("batch/v1", "Job", object_name(ATTEMPT), namespace="falaj-risk")
    testbed.launcher.state(ATTEMPT)
    testbed.now += EXPLAIN_AFTER_S

    state = testbed.launcher.state(ATTEMPT)

    why = "was deleted" if is_deleted else "failed (BackoffLimitExceeded): no retries"
    assert state.phase == "ended"
    assert state.evicted is not None
    assert why in state.evicted
    with pytest.raises(Conflict):
        testbed.launcher.worker_host(ATTEMPT).claim(0, "u1")


def test_an_image_that_cannot_be_pulled_fails_the_attempt_after_a_while(testbed: Testbed) -> None:
    testbed.launcher.start(testbed.launch())
    testbed.pod("Pending", waits_for="Its image x cannot be pulled (ErrImagePull): no such host")
    assert testbed.launcher.state(ATTEMPT).phase == "starting"
    testbed.now += IMAGE_PATIENCE_S

    state = testbed.launcher.state(ATTEMPT)

    assert (state.phase, state.exit_code, state.evicted) == ("ended", None, None)
    assert state.reason is not None
    assert "cannot be pulled" in state.reason
    with pytest.raises(Conflict):
        testbed.launcher.worker_host(ATTEMPT).claim(0, "u1")


@pytest.mark.parametrize("has_claim", [False, True])
def test_an_attempt_whose_nodes_have_no_room_any_more_goes_back_to_its_queue(
    testbed: Testbed, has_claim: bool
) -> None:
    testbed.launcher.start(testbed.launch(nodes=2, hosts=("n1", "n2")))
    why = "The cluster cannot place its pod: 0/2 nodes are available: 1 Insufficient cpu"
    first = testbed.pod("Running", node="n1")
    unplaced = replace(first, node_rank=1, uid="u2", phase="Pending", node=None, waits_for=why)
    testbed.cluster.found = [first, unplaced]
    if has_claim:
        testbed.launcher.worker_host(ATTEMPT).claim(0, "u1")
    assert testbed.launcher.state(ATTEMPT).phase == ("running" if has_claim else "starting")
    testbed.now += UNPLACED_PATIENCE_S + testbed.settings.grace_s - 1
    assert testbed.launcher.state(ATTEMPT).evicted is None

    testbed.now += 1
    state = testbed.launcher.state(ATTEMPT)

    assert (state.phase, state.evicted, state.exit_code) == ("lost" if has_claim else "ended", why, None)
    with pytest.raises(Conflict):
        testbed.launcher.worker_host(ATTEMPT).claim(1, "u2")


def test_a_stop_before_any_pod_has_begun_needs_no_pod(testbed: Testbed) -> None:
    testbed.launcher.start(testbed.launch())
    testbed.cluster.current = False  # and no API server

    testbed.launcher.stop(ATTEMPT, grace_s=5)

    state = testbed.launcher.state(ATTEMPT)
    assert (state.phase, state.stopped) == ("ended", True)
    with pytest.raises(Conflict):
        testbed.launcher.worker_host(ATTEMPT).claim(0, "u1")


def test_a_pod_that_nobody_sees_is_lost_only_when_its_lease_has_run_out(testbed: Testbed) -> None:
    testbed.launcher.start(testbed.launch())
    worker = testbed.launcher.worker_host(ATTEMPT)
    worker.claim(0, "u1")
    testbed.cluster.found = []

    assert testbed.launcher.state(ATTEMPT).phase == "running"
    assert worker.renew(0, "u1").stop_grace_s is None  # the watch may be behind
    testbed.now += GONE_AFTER_S
    assert testbed.launcher.state(ATTEMPT).phase == "running"
    assert worker.renew(0, "u1").stop_grace_s == 0.0
    testbed.now += fence_wait_s(FENCE_S) - 0.1
    assert testbed.launcher.state(ATTEMPT).phase == "running"
    testbed.now += 0.2
    state = testbed.launcher.state(ATTEMPT)

    assert (state.phase, state.evicted) == ("lost", GONE)
    with pytest.raises(Conflict, match="over"):
        worker.renew(0, "u1")


def test_a_pod_that_was_only_seen_late_goes_on(testbed: Testbed) -> None:
    testbed.launcher.start(testbed.launch())
    worker = testbed.launcher.worker_host(ATTEMPT)
    worker.claim(0, "u1")
    testbed.launcher.state(ATTEMPT)
    testbed.pod("Running")
    testbed.launcher.state(ATTEMPT)
    testbed.now += 10_000
    testbed.cluster.found = []

    assert testbed.launcher.state(ATTEMPT).phase == "running"
    assert worker.renew(0, "u1").stop_grace_s is None


def test_nothing_is_concluded_from_pods_that_are_not_current(testbed: Testbed) -> None:
    testbed.launcher.start(testbed.launch())
    testbed.launcher.worker_host(ATTEMPT).claim(0, "u1")
    testbed.cluster.current, testbed.cluster.found = False, []
    testbed.launcher.state(ATTEMPT)
    testbed.now += 10_000

    assert testbed.launcher.state(ATTEMPT).phase == "running"


def test_a_pod_killed_with_its_worker_is_lost_with_the_clusters_reason(testbed: Testbed) -> None:
    testbed.launcher.start(testbed.launch())
    testbed.launcher.worker_host(ATTEMPT).claim(0, "u1")
    testbed.pod("Failed", fault="Its pod ran out of memory, and the kernel killed it (OOMKilled)")
    assert testbed.launcher.state(ATTEMPT).phase == "running"
    testbed.now += REPORT_WAIT_S

    state = testbed.launcher.state(ATTEMPT)

    assert (state.phase, state.evicted) == ("lost", None)
    assert state.reason == "Its pod ran out of memory, and the kernel killed it (OOMKilled)"


@pytest.mark.parametrize(
    ("exit_code", "delivered", "phase"), [(3, False, "ended"), (0, True, "ended"), (0, False, "lost")]
)
def test_the_termination_message_speaks_for_a_worker_that_could_not(
    testbed: Testbed, exit_code: int, delivered: bool, phase: str
) -> None:
    testbed.launcher.start(testbed.launch())
    testbed.launcher.worker_host(ATTEMPT).claim(0, "u1")
    result = RESULT | {"exit_code": exit_code, "delivered": delivered}
    testbed.pod("Failed" if exit_code else "Succeeded", result=result)
    testbed.launcher.state(ATTEMPT)
    testbed.now += REPORT_WAIT_S
    testbed.launcher.state(ATTEMPT)

    state = testbed.launcher.state(ATTEMPT)

    assert state.phase == phase
    assert state.exit_code == (exit_code if phase == "ended" else None)
    assert (state.evicted is None) == (phase == "ended")


def test_nodes_end_together_and_the_first_failure_counts(testbed: Testbed) -> None:
    testbed.launcher.start(testbed.launch(nodes=2))
    worker = testbed.launcher.worker_host(ATTEMPT)
    for node in (0, 1):
        worker.claim(node, f"u{node}")
    worker.end(1, "u1", RESULT | {"exit_code": 7, "reason": "Exit code 7", "ended_at": 15.0})
    testbed.pod("Running")

    assert testbed.launcher.state(ATTEMPT).phase == "running"
    assert worker.renew(0, "u0").stop_grace_s == 10.0
    worker.end(0, "u0", RESULT | {"exit_code": None, "signal": 15, "stopped": True, "reason": "stopped"})
    state = testbed.launcher.state(ATTEMPT)

    assert (state.phase, state.exit_code, state.reason) == ("ended", 7, "Exit code 7")
    assert state.used.cpu_s == 2.0
    assert ("Service", object_name(ATTEMPT)) in testbed.cluster.objects


SERVED = {"framework": "tensorflow", "nodes": 2, "roles": {"chief": 1, "ps": 1}}
KILLED = {"exit_code": None, "signal": 9, "stopped": True, "reason": "It was stopped on request"}


@pytest.mark.parametrize("reports", [True, False])
def test_an_attempt_ends_when_the_nodes_have_ended_whose_end_decides(testbed: Testbed, reports: bool) -> None:
    testbed.launcher.start(testbed.launch(**SERVED))
    worker = testbed.launcher.worker_host(ATTEMPT)
    for node in (0, 1):
        worker.claim(node, f"u{node}")
    assert worker.renew(1, "u1").stop_grace_s is None

    worker.end(0, "u0", RESULT)
    assert testbed.launcher.state(ATTEMPT).phase == "running"
    assert worker.renew(1, "u1").stop_grace_s == 0.0
    if reports:
        worker.end(1, "u1", RESULT | KILLED)
    testbed.now += REPORT_WAIT_S

    state = testbed.launcher.state(ATTEMPT)
    assert (state.phase, state.exit_code, state.reason, state.stopped) == ("ended", 0, None, False)


def test_a_server_that_fails_fails_the_attempt(testbed: Testbed) -> None:
    testbed.launcher.start(testbed.launch(**SERVED))
    worker = testbed.launcher.worker_host(ATTEMPT)
    for node in (0, 1):
        worker.claim(node, f"u{node}")
    worker.end(1, "u1", RESULT | {"exit_code": 3, "reason": "Exit code 3"})
    assert worker.renew(0, "u0").stop_grace_s == 10.0
    worker.end(0, "u0", RESULT | KILLED)

    state = testbed.launcher.state(ATTEMPT)
    assert (state.phase, state.exit_code, state.reason) == ("ended", 3, "Exit code 3")


def test_a_killed_supervisor_is_a_lost_attempt(testbed: Testbed) -> None:
    testbed.launcher.start(testbed.launch())
    worker = testbed.launcher.worker_host(ATTEMPT)
    worker.claim(0, "u1")

    worker.end(0, "u1", RESULT | {"exit_code": None, "lost": True, "reason": "Its supervisor was killed"})

    assert testbed.launcher.state(ATTEMPT).phase == "lost"


def test_an_eviction_is_no_success_even_if_the_script_exits_cleanly(testbed: Testbed) -> None:
    testbed.launcher.start(testbed.launch())
    worker = testbed.launcher.worker_host(ATTEMPT)
    worker.claim(0, "u1")
    worker.end(0, "u1", RESULT | {"stopped": True, "evicted": True})

    state = testbed.launcher.state(ATTEMPT)

    assert (state.exit_code, state.evicted, state.stopped) == (0, "the cluster told its pod to end", False)


@pytest.mark.parametrize("objects", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("has_reported", [True, False])
def test_an_object_that_someone_deleted_is_named(
    testbed: Testbed, objects: Objects, has_reported: bool
) -> None:
    testbed.launcher._objects = objects
    testbed.launcher.start(testbed.launch())
    worker = testbed.launcher.worker_host(ATTEMPT)
    worker.claim(0, "u1")
    kind = {"job": "Job", "jobset": "JobSet", "trainjob": "TrainJob"}[objects]
    name = object_name(ATTEMPT)

    testbed.cluster.delete("", kind, name, namespace="falaj-risk")
    if has_reported:
        worker.end(0, "u1", RESULT | {"stopped": True, "evicted": True})
    else:
        testbed.launcher.state(ATTEMPT)
        testbed.now += GONE_AFTER_S + fence_wait_s(FENCE_S)
    found = [each.state(ATTEMPT).evicted for each in (testbed.launcher, testbed.another())]

    assert found[0] == found[1]
    assert (found[0] or "").startswith(f"its {kind} {name} was deleted")


def test_a_sweep_removes_only_what_is_ours_and_not_wanted(testbed: Testbed) -> None:
    testbed.launcher.start(testbed.launch())
    wanted = replace(testbed.launch(), attempt="job_2/1")
    testbed.launcher.start(wanted)
    for name, notes in {"theirs": {}, "copy": {"falaj.dev/attempt-name": ATTEMPT}}.items():
        named = {"name": name, "namespace": "falaj-risk", "annotations": notes}
        testbed.cluster.create({"kind": "Job", "metadata": named})

    removed = testbed.launcher.sweep(lambda attempt: attempt == "job_2/1")

    assert removed == [ATTEMPT]
    left = {name for kind, name in testbed.cluster.objects if kind == "Job"}
    assert left == {"theirs", "copy", object_name("job_2/1")}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": ("GPU-1",), "gpu_milli": 500}, "whole GPUs"),
        ({"nsys": True}, "one machine"),
        ({"framework": "horovod", "nodes": 2}, "horovod on one machine"),
    ],
)
def test_what_pods_cannot_do_is_refused(testbed: Testbed, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        testbed.launcher.start(testbed.launch(**options))


# ------------------------------------------------------------------------------------------------ isolation


def test_objects_are_in_the_namespace_of_the_workspace_also_after_a_restart(testbed: Testbed) -> None:
    testbed.launcher.start(testbed.launch(nodes=2))

    assert testbed.namespaces.asked == ["risk"]
    assert {each["metadata"]["namespace"] for each in testbed.cluster.objects.values()} == {"falaj-risk"}
    assert RemoteAttempt(testbed.folder / "state" / "job_1%2F1").namespace == "falaj-risk"
    testbed.another(scheduler="falaj").delete(ATTEMPT)
    assert not [name for kind, name in testbed.cluster.objects if kind == "Job"]


def test_only_the_pods_of_one_job_reach_each_other(testbed: Testbed) -> None:
    testbed.launcher.start(testbed.launch(nodes=2))

    policy = testbed.cluster.objects["NetworkPolicy", object_name(ATTEMPT)]
    same = {"matchLabels": {"falaj.dev/job": "job_1"}}
    assert policy["spec"]["podSelector"] == same
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": same}]}]
    assert policy["spec"]["egress"] == [{"to": [{"podSelector": same}]}]
    assert policy["metadata"]["ownerReferences"][0]["kind"] == "Job"


def test_a_namespace_that_was_deleted_is_made_again(testbed: Testbed) -> None:
    testbed.cluster.fails_at, testbed.cluster.failure = 1, NotFound('namespaces "falaj-risk" not found')

    with pytest.raises(Unavailable, match="it is made again"):
        testbed.launcher.start(testbed.launch())
    testbed.launcher.start(testbed.launch())

    assert testbed.namespaces.forgotten == ["falaj-risk"]
    assert testbed.launcher.state(ATTEMPT).phase == "starting"


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({}, {"network": True}, r"kubernetes\.egress"),
        ({"images": ("worker",)}, {}, r"kubernetes\.images"),
        ({}, {"labels": {}}, "a workspace that exists"),
    ],
)
def test_what_the_administrator_does_not_allow_is_refused_before_anything_is_created(
    testbed: Testbed, settings: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        testbed.another(**settings).start(testbed.launch(**options))

    assert testbed.cluster.objects == {}
    assert not (testbed.folder / "state").exists()


def test_jobs_with_the_network_are_marked_for_the_policy_of_the_namespace(testbed: Testbed) -> None:
    testbed.another(has_egress=True).start(testbed.launch(network=True))

    job = testbed.cluster.objects["Job", object_name(ATTEMPT)]
    assert job["spec"]["template"]["metadata"]["labels"]["falaj.dev/network"] == "allowed"


# ---------------------------------------------------------------------------------------------- Kueue decides


class FakeKueue:
    """What Kueue says about the only attempt."""

    def __init__(self) -> None:
        self.workload: WorkloadFacts | None = None

    def find(self, owner: str, *, namespace: str) -> WorkloadFacts | None:
        return self.workload

    def explain(self, owner: str, *, namespace: str, queue: str, priority_class: str) -> str:
        return f"LocalQueue {queue} is stopped ({priority_class})"

    def owner_of(self, uid: str | None) -> str | None:
        return "falaj-winner-1" if uid == "u-2" else None


WAITING = WorkloadFacts(
    "job-1", "u-1", object_name(ATTEMPT), waits_for="Kueue waits for quota: 1 more needed"
)
OPEN = OpenPlacement(priority=1000)


@pytest.fixture
def kueue(testbed: Testbed) -> FakeKueue:
    testbed.settings = replace(testbed.settings, scheduler="kueue")
    testbed.admissions = kueue = FakeKueue()
    testbed.cluster.groups |= {"kueue.x-k8s.io"}
    testbed.launcher = testbed.another()
    return kueue


def test_an_attempt_waits_for_kueue_and_then_for_its_pod(testbed: Testbed, kueue: FakeKueue) -> None:
    testbed.launcher.start(testbed.launch(open_placement=OPEN, labels={"workspace": "risk", "queue": "risk"}))
    kueue.workload = WAITING

    assert testbed.launcher.state(ATTEMPT).reason == "Kueue waits for quota: 1 more needed"
    testbed.now += 100
    assert testbed.launcher.state(ATTEMPT).reason == "Kueue waits for quota: 1 more needed"

    kueue.workload = replace(WAITING, waits_for=None)
    testbed.pod("Pending", waits_for="The cluster cannot place its pod")
    assert testbed.launcher.state(ATTEMPT).reason == "The cluster cannot place its pod"


@pytest.mark.parametrize("workload", [None, replace(WAITING, is_blocked=True)])
def test_a_queue_that_admits_nothing_is_explained_from_its_objects(
    testbed: Testbed, kueue: FakeKueue, workload: WorkloadFacts | None
) -> None:
    testbed.launcher.start(testbed.launch(open_placement=OPEN, labels={"workspace": "risk", "queue": "risk"}))
    kueue.workload = workload

    testbed.launcher.state(ATTEMPT)
    testbed.now += EXPLAIN_AFTER_S

    assert testbed.launcher.state(ATTEMPT).reason == "LocalQueue risk is stopped (falaj-high)"


def test_a_cluster_without_kueue_starts_nothing(testbed: Testbed, kueue: FakeKueue) -> None:
    testbed.cluster.groups = frozenset({"batch"})

    with pytest.raises(Unavailable, match=r"does not serve kueue\.x-k8s\.io: install Kueue"):
        testbed.launcher.start(testbed.launch(open_placement=OPEN))

    assert testbed.cluster.objects == {}


def test_a_preemption_is_known_also_after_kueue_has_forgotten_it(testbed: Testbed, kueue: FakeKueue) -> None:
    testbed.launcher.start(testbed.launch(open_placement=OPEN))
    testbed.pod("Running", node="node-1")
    host = testbed.launcher.worker_host(ATTEMPT)
    host.claim(0, "u1")
    assert testbed.launcher.state(ATTEMPT).hosts == ("node-1",)

    why = "Kueue preempted it: due to prioritization"
    kueue.workload = replace(WAITING, evicted=why, is_preempted=True, preemptor="u-2")
    assert testbed.launcher.state(ATTEMPT).phase == "running"
    kueue.workload = replace(WAITING, waits_for=None)
    host.end(0, "u1", RESULT | {"exit_code": 143, "evicted": True, "stopped": True})

    state = testbed.another().state(ATTEMPT)
    assert (state.phase, state.preempted, state.hosts) == ("ended", True, ("node-1",))
    assert state.evicted == f"{why}; it made room for falaj-winner-1"


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        (None, "does not exist; an administrator of the cluster creates it"),
        ({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, "is being deleted"),
        (
            {"metadata": {}, "status": {"phase": "Lost"}, "spec": {"volumeName": "pv-1"}},
            "has lost its PersistentVolume pv-1",
        ),
    ],
)
def test_an_attempt_waits_for_a_claim_and_says_which(
    testbed: Testbed, claim: dict[str, Any] | None, words: str
) -> None:
    given = testbed.launch(volumes=(VolumeMount("images", claim="data"),))
    if claim is not None:
        testbed.cluster.objects["PersistentVolumeClaim", "data"] = claim

    with pytest.raises(Unavailable) as refused:
        testbed.launcher.start(given)

    assert refused.value.message == f"PersistentVolumeClaim data in namespace falaj-risk {words}"
    assert not [name for kind, name in testbed.cluster.objects if kind == "Job"]
    testbed.cluster.objects["PersistentVolumeClaim", "data"] = {"metadata": {}, "status": {"phase": "Bound"}}
    testbed.launcher.start(given)
    assert [name for kind, name in testbed.cluster.objects if kind == "Job"]
