"""A drained node: its jobs save a checkpoint, wait, and continue when a node takes them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from falaj.control.jobs.reconciler import JobReconciler
from falaj.control.nodes import Nodes
from falaj.drivers.kubernetes.inventory.node_facts import facts_of
from falaj.drivers.kubernetes.maintenance import cordoned, uncordoned
from falaj.drivers.machine.mig import NvidiaSmi
from falaj.errors import Conflict, Denied, NotFound, Unavailable
from falaj.governance.operations.caller import acting_as
from falaj.ports.cluster.maintenance import CordonNote, Uncordoned
from falaj.ports.launcher import AttemptState
from falaj.ports.machine.hardware import NodeFacts, NodeTelemetry
from falaj.records.config import KubernetesConfig
from falaj.records.governance.identity import Role
from falaj.records.scheduling.hardware import NodePod
from falaj.records.scheduling.mig import GpuSettings
from falaj.records.scheduling.snapshot import Node, Reason
from falaj.records.training.jobs import Job, JobState
from job_harness import DONE, JobHarness
from polling import eventually
from recorded_nodes import node as recorded
from recorded_nodes import patched


class HarnessNodes:
    """The node of the harness, with its facts."""

    def __init__(self, harness: JobHarness) -> None:
        self._machine = harness.machine

    def machines(self) -> tuple[tuple[NodeFacts, Node], ...]:
        node = self._machine.node
        return ((NodeFacts(name=node.name, cpus=node.cpus, memory_bytes=node.memory_bytes), node),)

    def telemetry(self) -> tuple[NodeTelemetry, ...]:
        return ()


class RecordedMaintenance:
    """The node of the harness as an object of a cluster; `pods_there` and `denied` are what the test says."""

    def __init__(self) -> None:
        self.node = recorded("here", labels={}, allocatable={"cpu": "4", "memory": "8Gi"})
        self.pods_there: list[NodePod] = []
        self.denied = ""

    def cordon(self, node: str, note: CordonNote) -> None:
        if self.denied:
            raise Unavailable(self.denied)
        self.node = patched(self.node, cordoned(self.node, "falaj", note))

    def uncordon(self, node: str) -> Uncordoned:
        done, change = uncordoned(self.node, "falaj")
        self.node = patched(self.node, change)
        return done

    def pods(self, node: str) -> list[NodePod]:
        if self.denied:
            raise Unavailable(self.denied)
        return self.pods_there

    def label(self, node: str, labels: Mapping[str, str | None]) -> None:
        self.node = patched(self.node, {"metadata": {"labels": dict(labels)}})


class ClusterNodes(HarnessNodes):
    """The node of the harness, as its cluster says it is."""

    def __init__(self, harness: JobHarness, maintenance: RecordedMaintenance) -> None:
        super().__init__(harness)
        self._maintenance = maintenance

    def machines(self) -> tuple[tuple[NodeFacts, Node], ...]:
        facts, node = facts_of(self._maintenance.node, KubernetesConfig()), self._machine.node
        is_ready = facts.cluster is not None and facts.cluster.state == "ready"
        return ((facts, node.model_copy(update={"cordoned": not is_ready})),)


@pytest.fixture
def harness(light_harness: JobHarness) -> JobHarness:
    light_harness.launcher.program = lambda _: AttemptState("running")
    return light_harness


@pytest.fixture
def nodes(harness: JobHarness) -> Nodes:
    return Nodes(
        harness.platform.parts.gate, HarnessNodes(harness), queue=harness.jobs.queue, mig=NvidiaSmi()
    )


@pytest.fixture
def maintenance() -> RecordedMaintenance:
    return RecordedMaintenance()


@pytest.fixture
def cluster(harness: JobHarness, maintenance: RecordedMaintenance) -> Nodes:
    source = ClusterNodes(harness, maintenance)
    return Nodes(
        harness.platform.parts.gate,
        source,
        queue=harness.jobs.queue,
        mig=NvidiaSmi(),
        maintenance=maintenance,
    )


def running(harness: JobHarness, **spec: object) -> tuple[Job, JobReconciler]:
    job, reconciler = harness.submit(**spec), harness.reconciler()
    reconciler.tick()
    eventually(lambda: harness.launcher.state(f"{job.id}/1").phase == "running")
    return job, reconciler


@pytest.mark.slow
def test_a_drained_node_gives_its_jobs_time_to_save_and_takes_them_back_later(
    harness: JobHarness, nodes: Nodes
) -> None:
    job, reconciler = running(harness)

    drained = nodes.drain("here", reason="a fan is replaced")

    assert (drained.leaving, drained.staying) == ((job.id,), ())
    assert drained.machine.cordon is not None
    assert (drained.machine.cordon.reason, drained.machine.cordon.drained) == ("a fan is replaced", True)
    reconciler.tick()
    eventually(lambda: harness.jobs.show(job.id).state is JobState.QUEUED)
    assert harness.launcher.graces == [60.0]
    assert harness.jobs.show(job.id).reason == (
        "moved: node here was drained; it continues on another node, or when this one is back"
    )
    reconciler.tick()
    assert harness.jobs.show(job.id).state is JobState.QUEUED
    assert harness.jobs.explain(job.id).reason is Reason.CORDONED
    (machine,) = nodes.list()
    assert (machine.jobs, machine.node.cordoned) == (0, True)

    harness.launcher.program = lambda _: DONE
    nodes.uncordon("here")
    reconciler.tick()
    eventually(lambda: harness.jobs.show(job.id).state is JobState.DONE)
    assert harness.launcher.runs == {f"{job.id}/1": 1, f"{job.id}/2": 1}


@pytest.mark.slow
def test_a_job_that_is_not_preemptible_runs_to_its_end_unless_it_is_forced(
    harness: JobHarness, nodes: Nodes
) -> None:
    job, reconciler = running(harness, preemptible=False)

    assert nodes.drain("here").staying == (job.id,)
    reconciler.tick()
    assert harness.jobs.show(job.id).state is JobState.RUNNING

    assert nodes.drain("here", force=True).leaving == (job.id,)
    reconciler.tick()
    eventually(lambda: harness.jobs.show(job.id).state is JobState.QUEUED)


@pytest.mark.slow
def test_a_cordoned_node_keeps_its_jobs_and_starts_no_others(harness: JobHarness, nodes: Nodes) -> None:
    job, reconciler = running(harness)

    machine = nodes.cordon("here")
    waiting = harness.submit()
    reconciler.tick()

    assert (machine.jobs, machine.node.cordoned) == (1, True)
    assert harness.jobs.show(job.id).state is JobState.RUNNING
    assert harness.jobs.explain(waiting.id).reason is Reason.CORDONED


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of the fenced one
def test_a_controller_that_is_killed_after_the_drain_leaves_it_to_the_next(
    harness: JobHarness, nodes: Nodes
) -> None:
    job, _ = running(harness)
    nodes.drain("here")

    next_one = harness.reconciler()
    next_one.tick()

    eventually(lambda: harness.jobs.show(job.id).state is JobState.QUEUED)
    next_one.tick()
    assert harness.launcher.runs == {f"{job.id}/1": 1}


def test_bad_input_is_explained(nodes: Nodes) -> None:
    with pytest.raises(NotFound, match="there is no node gpu-9; the nodes are: here"):
        nodes.cordon("gpu-9")
    with pytest.raises(NotFound):
        nodes.drain("gpu-9")
    with pytest.raises(Conflict, match="node here is not cordoned"):
        nodes.uncordon("here")


def test_only_operators_take_nodes_out_of_service(harness: JobHarness, nodes: Nodes) -> None:
    developer = harness.platform.join("dev", Role.DEVELOPER)

    with acting_as(developer):
        for attempt in (nodes.cordon, nodes.drain, nodes.uncordon):
            with pytest.raises(Denied):
                attempt("here")


# ----------------------------------------------------------------------------------------------- a cluster


@pytest.mark.slow
def test_a_drain_on_a_cluster_closes_the_node_and_leaves_the_pods_of_others(
    harness: JobHarness, cluster: Nodes, maintenance: RecordedMaintenance
) -> None:
    job, reconciler = running(harness)
    proxy = NodePod(namespace="kube-system", name="proxy-x", owner="DaemonSet/proxy")
    maintenance.pods_there = [proxy, NodePod(namespace="falaj", name="p", job=job.id)]

    drained = cluster.drain("here", reason="a fan is replaced")

    assert maintenance.node["spec"]["unschedulable"] is True
    assert (drained.leaving, drained.others, drained.unseen) == ((job.id,), (proxy,), "")
    reconciler.tick()
    eventually(lambda: harness.jobs.show(job.id).state is JobState.QUEUED)
    (machine,) = cluster.list()
    assert machine.cluster is not None
    assert (machine.cluster.state, machine.cluster.reason) == ("cordoned", "cordoned by this platform")

    assert not cluster.uncordon("here").node.cordoned
    assert "unschedulable" not in maintenance.node["spec"]


def test_a_job_whose_pod_is_there_leaves_also_if_it_was_placed_elsewhere(
    harness: JobHarness, cluster: Nodes, maintenance: RecordedMaintenance
) -> None:
    job, _ = running(harness)
    placed = harness.machine.node
    harness.machine.node = placed.model_copy(update={"name": "another"})
    maintenance.node["metadata"]["name"] = "another"
    maintenance.pods_there = [NodePod(namespace="falaj", name="p", job=job.id)]

    assert cluster.drain("another").leaving == (job.id,)


def test_a_node_that_kubectl_cordoned_is_told_as_such(
    cluster: Nodes, maintenance: RecordedMaintenance
) -> None:
    maintenance.node["spec"]["unschedulable"] = True

    with pytest.raises(Conflict, match=r"not cordoned by this platform: .* kubectl uncordon here"):
        cluster.uncordon("here")
    cluster.cordon("here")
    still = cluster.uncordon("here")

    assert still.node.cordoned
    assert still.cordon is None
    assert maintenance.node["spec"]["unschedulable"] is True


def test_a_missing_right_changes_nothing(
    harness: JobHarness, cluster: Nodes, maintenance: RecordedMaintenance
) -> None:
    job, _ = running(harness)
    maintenance.denied = "cannot cordon node here: falaj may not patch nodes"

    for attempt in (cluster.cordon, cluster.drain):
        with pytest.raises(Unavailable, match="may not patch nodes"):
            attempt("here")

    assert cluster.list()[0].cordon is None
    assert not harness.jobs.show(job.id).reason


def test_an_uncordon_that_was_killed_before_its_record_can_be_given_again(
    cluster: Nodes, maintenance: RecordedMaintenance
) -> None:
    cluster.cordon("here")
    maintenance.uncordon("here")  # and then the process was killed

    assert cluster.list()[0].node.cordoned
    assert not cluster.uncordon("here").node.cordoned


def test_a_cordon_that_was_killed_before_its_record_can_be_undone(
    cluster: Nodes, maintenance: RecordedMaintenance, harness: JobHarness
) -> None:
    maintenance.cordon("here", CordonNote("alice", harness.platform.parts.gate.clock()))

    assert cluster.list()[0].node.cordoned
    assert not cluster.uncordon("here").node.cordoned


def test_gpus_are_changed_only_on_a_drained_node_without_jobs(
    harness: JobHarness, cluster: Nodes, maintenance: RecordedMaintenance
) -> None:
    settings = GpuSettings(mig="falaj-1")
    with pytest.raises(Conflict, match="node here is not drained"):
        cluster.configure_gpus("here", settings=settings)
    job, _ = running(harness)
    cluster.drain("here")

    with pytest.raises(Conflict, match=f"1 jobs run on node here: {job.id}"):
        cluster.configure_gpus("here", settings=settings)
    assert "nvidia.com/mig.config" not in maintenance.node["metadata"]["labels"]
    assert cluster.plan_mig().cards == ()
