"""Operations on the nodes that jobs run on: what they have, and how they are taken out of service and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Annotated, Protocol

from pydantic import StringConstraints

from falaj.control.gpu_settings import cut_cards, set_labels
from falaj.control.scale_up import ScaleUp
from falaj.errors import Conflict, NotFound, Unavailable
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.ports.cluster.maintenance import CordonNote, NodeMaintenance, Uncordoned
from falaj.ports.machine.hardware import MigTool, NodeFacts, NodeTelemetry
from falaj.ports.metadata import Transaction
from falaj.records.governance.identity import Role
from falaj.records.names import Name
from falaj.records.scheduling.hardware import (
    ClusterStatus,
    Cordon,
    FreeResources,
    Machine,
    NodeDrain,
    NodePod,
)
from falaj.records.scheduling.mig import GpuConfiguration, GpuSettings, MigPlan
from falaj.records.scheduling.scale_up import ScaleUpHint
from falaj.records.scheduling.snapshot import WHOLE_GPU, HeldByOthers, Node
from falaj.records.training.jobs import JobState
from falaj.scheduling import cordons
from falaj.scheduling.accounting.attempts import past_attempts
from falaj.scheduling.mig.cards import mig_cards
from falaj.scheduling.mig.plan import plan_layouts
from falaj.training import store
from falaj.training.queue import QueueReader
from falaj.training.store import JobRow

RECENT = timedelta(days=7)
"""Jobs of so long ago count for the layouts of GPUs."""

CordonReason = Annotated[str, StringConstraints(max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")]


class NodeSource(Protocol):
    """Provides the facts of the nodes."""

    def machines(self) -> tuple[tuple[NodeFacts, Node], ...]:
        """Return all nodes, also those that are lost."""
        ...

    def telemetry(self) -> tuple[NodeTelemetry, ...]: ...


class Nodes:
    """The nodes that jobs run on, and their maintenance.

    On a cluster the Node object is changed first, then the platform's own record: whichever of the two is killed
    between, the node takes no jobs, and the same command can be given again.
    """

    def __init__(
        self,
        gate: Gate,
        source: NodeSource,
        *,
        queue: QueueReader,
        mig: MigTool,
        maintenance: NodeMaintenance | None = None,
        scale_up: ScaleUp | None = None,
    ) -> None:
        """`mig` cuts the GPUs of the platform's own machine; `maintenance` is none where jobs run there.

        `scale_up` is what autoscalers are asked for.
        """
        self.autoscaling = scale_up
        self.gate = gate
        self._source = source
        self._queue = queue
        self._mig = mig
        self._maintenance = maintenance

    @operation("nodes.list", resource="platform", mode=Mode.READ, allow="anyone")
    def list(self) -> tuple[Machine, ...]:
        """List the nodes: their CPUs, memory, GPUs and networks, what is free now, and which are cordoned or lost."""
        return machines_now(current_call().tx, self._source)

    @operation("nodes.cordon", resource="platform", mode=Mode.LATE, allow=Role.OPERATOR)
    def cordon(self, node: Name, *, reason: CordonReason = "") -> Machine:
        """Start no further jobs on a node; what runs there goes on. On a cluster it takes no other new pods either."""
        call, (facts, found) = current_call(), self._node(node)
        cordon = self._cordon(call, node, reason, drained=False)

        def record() -> Machine:
            self._record(call, node, cordon)
            return machine_record(facts, found, _running(call.tx), cordon)

        return self.gate.commit(call, record)

    @operation("nodes.drain", resource="platform", mode=Mode.LATE, allow=Role.OPERATOR, confirm=True)
    def drain(self, node: Name, *, reason: CordonReason = "", force: bool = False) -> NodeDrain:
        """Cordon a node, and let its jobs save a checkpoint and go back to their queues.

        Jobs that are not preemptible run to their end, unless `force` stops them too. Pods of others stay.
        """
        call, (facts, found) = current_call(), self._node(node)
        cordon = self._cordon(call, node, reason, drained=True)
        pods, unseen = self._pods(node)

        def record() -> NodeDrain:
            leaving, staying = _leave(call.tx, node, pods, force=force)
            self._record(call, node, cordon)
            return NodeDrain(
                machine=machine_record(facts, found, _running(call.tx), cordon),
                leaving=tuple(row.id for row in leaving),
                staying=tuple(row.id for row in staying),
                others=tuple(each for each in pods if each.job is None),
                unseen=unseen,
            )

        return self.gate.commit(call, record)

    @operation("nodes.uncordon", resource="platform", mode=Mode.LATE, allow=Role.OPERATOR)
    def uncordon(self, node: Name) -> Machine:
        """Let a node start jobs again. What others have cordoned stays so."""
        call, (facts, found) = current_call(), self._node(node)
        known = self._known(node)
        done = Uncordoned(False, "") if self._maintenance is None else self._maintenance.uncordon(node)
        if known is None and not done.was_noted:
            raise Conflict(_not_cordoned(node, facts, done))
        status = None if facts.cluster is None else _reopened(cluster_status(facts), done)

        def record() -> Machine:
            cordons.remove_cordon(call.tx, node)
            store.record_queue_change(call.tx)
            made = machine_record(facts, found, _running(call.tx), None)
            if status is None:
                return made
            is_closed = status.state != "ready"
            opened = made.node.model_copy(update={"cordoned": is_closed})
            return made.model_copy(update={"node": opened, "cluster": status})

        return self.gate.commit(call, record)

    @operation("nodes.scale_up", resource="platform", mode=Mode.FREE, allow=Role.OPERATOR)
    def scale_up(self) -> tuple[ScaleUpHint, ...]:
        """List the waiting jobs for which autoscalers are asked for nodes, and the shapes of the pods that ask."""
        return () if self.autoscaling is None else self.autoscaling.hints()

    @operation("nodes.plan_mig", resource="platform", mode=Mode.FREE, allow=Role.OPERATOR)
    def plan_mig(self) -> MigPlan:
        """Show how idle GPUs would have to be cut by MIG so that waiting jobs could start. Nothing is changed."""
        now = current_call().now
        machines = [(facts, node) for facts, node in self._source.machines() if not _is_lost(facts)]
        with self.gate.database.read() as tx:
            seen = self._queue.snapshot(tx, [node for _, node in machines], now=now).snapshot
        past = past_attempts(self.gate.database, since=now - RECENT, until=now, as_of=now)
        recent = Counter(
            each.request.each.gpu_profile
            for each in past
            if each.attempt == 1 and each.request.each.gpus and each.request.each.gpu_milli == WHOLE_GPU
        )
        return plan_layouts(mig_cards(machines, seen.running), seen.nodes, seen.pending, recent)

    @operation("nodes.configure_gpus", resource="platform", mode=Mode.LATE, allow=Role.OPERATOR, confirm=True)
    def configure_gpus(self, node: Name, *, settings: GpuSettings) -> GpuConfiguration:
        """Cut the GPUs of a drained node by MIG, or share them. No job may run there.

        On a cluster this sets the labels of NVIDIA's MIG manager and device plugin, which then do it.
        """
        call, (facts, _) = current_call(), self._node(node)
        self._require_drained(node)
        if self._maintenance is not None:
            before = set_labels(self._maintenance, node, facts, settings)
        else:
            before = cut_cards(self._mig, facts, settings)
        done = GpuConfiguration(node=node, settings=settings, before=before)

        def record() -> GpuConfiguration:
            store.record_queue_change(call.tx)
            return done

        return self.gate.commit(call, record)

    def _require_drained(self, node: str) -> None:
        with self.gate.database.read() as tx:
            cordon = cordons.all_cordons(tx).get(node)
            jobs = [str(row.id) for row in _running(tx) if any(each.node == node for each in row.placements)]
        jobs += [
            str(each.job) for each in self._pods(node)[0] if each.job is not None and each.job not in jobs
        ]
        if jobs:
            raise Conflict(f"{len(jobs)} jobs run on node {node}: {', '.join(jobs[:5])}; drain it first")
        if cordon is None or not cordon.drained:
            raise Conflict(
                f"node {node} is not drained, and could start jobs meanwhile: falaj nodes drain {node}"
            )

    def _cordon(self, call: Call, node: str, reason: str, *, drained: bool) -> Cordon:
        """Return the cordon of the platform, which the cluster has been told of."""
        known = self._known(node)
        cordon = Cordon(
            since=call.now if known is None else known.since,
            by=call.caller.name,
            reason=reason or (known.reason if known else ""),
            drained=drained or (known is not None and known.drained),
        )
        if self._maintenance is not None:
            note = CordonNote(by=cordon.by, since=cordon.since, reason=cordon.reason)
            self._maintenance.cordon(node, note)
        return cordon

    def _record(self, call: Call, node: str, cordon: Cordon) -> None:
        cordons.put_cordon(call.tx, node, cordon)
        store.record_queue_change(call.tx)

    def _known(self, node: str) -> Cordon | None:
        with self.gate.database.read() as tx:
            return cordons.all_cordons(tx).get(node)

    def _pods(self, node: str) -> tuple[Sequence[NodePod], str]:
        """Return the pods on a node, or why they are not known."""
        if self._maintenance is None:
            return (), ""
        try:
            return self._maintenance.pods(node), ""
        except Unavailable as error:
            return (), error.message

    def _node(self, name: str) -> tuple[NodeFacts, Node]:
        machines = self._source.machines()
        for facts, node in machines:
            if node.name == name:
                return facts, node
        known = ", ".join(sorted(node.name for _, node in machines)[:10]) or "none"
        raise NotFound(f"there is no node {name}; the nodes are: {known}")


def _is_lost(facts: NodeFacts) -> bool:
    return facts.cluster is not None and facts.cluster.state == "lost"


def _leave(
    tx: Transaction, node: str, pods: Iterable[NodePod], *, force: bool
) -> tuple[Sequence[JobRow], Sequence[JobRow]]:
    """Let the jobs on a node go, and return them and those that stay.

    They are those that the scheduler placed there, and those whose pods are there: Kueue may place them elsewhere.
    """
    seen = {each.job for each in pods}
    there = [
        row.id
        for row in _running(tx)
        if row.id in seen or any(placed.node == node for placed in row.placements)
    ]
    rows = [store.lock_job(tx, ident) for ident in sorted(there)]
    running = [row for row in rows if row.state is JobState.RUNNING and not row.cancelling]
    leaving = [row for row in running if force or row.spec.preemptible]
    for row in leaving:
        if not row.leaving:
            store.update_job(tx, row.id, leaving=True)
    return leaving, [row for row in running if row not in leaving]


def _not_cordoned(node: str, facts: NodeFacts, done: Uncordoned) -> str:
    if done.kept_by:
        return f"node {node} was not cordoned by this platform: {done.kept_by}; undo it with kubectl uncordon {node}"
    status = cluster_status(facts)
    if status is not None and status.taints:
        return f"node {node} is not cordoned: taints keep jobs off: {', '.join(status.taints)}"
    return f"node {node} is not cordoned"


def _reopened(status: ClusterStatus | None, done: Uncordoned) -> ClusterStatus | None:
    """Return the status of a node that was just uncordoned: what is known of the cluster is from before."""
    if status is None or status.state == "lost":
        return status
    if done.kept_by:
        return status.model_copy(update={"state": "cordoned", "reason": done.kept_by})
    if status.taints:
        return status.model_copy(
            update={"state": "cordoned", "reason": f"taint {status.taints[0]}", "since": None}
        )
    return status.model_copy(update={"state": "ready", "reason": "", "since": None})


def machines_now(tx: Transaction, source: NodeSource) -> tuple[Machine, ...]:
    running, known = _running(tx), cordons.all_cordons(tx)
    return tuple(
        machine_record(facts, node, running, known.get(node.name)) for facts, node in source.machines()
    )


def _running(tx: Transaction) -> Sequence[JobRow]:
    return [store.job_row(tx, each.id) for each in store.running(tx)]


def machine_record(
    facts: NodeFacts, node: Node, running: Sequence[JobRow], cordon: Cordon | None = None
) -> Machine:
    """Return the record of a node: its hardware, and what the `running` jobs leave free."""
    return Machine(
        node=node if cordon is None else node.model_copy(update={"cordoned": True}),
        cluster=cluster_status(facts),
        free=free_capacity(node, running),
        jobs=sum(any(placed.node == node.name for placed in row.placements) for row in running),
        cordon=cordon,
        cpu_model=facts.cpu_model,
        isa=facts.isa,
        sockets=facts.sockets,
        numa_nodes=facts.numa_nodes,
        driver=facts.driver,
        cards=facts.cards,
        rdma=facts.rdma,
        gpu_fault=facts.gpu_fault,
    )


def cluster_status(facts: NodeFacts) -> ClusterStatus | None:
    """Return what a cluster says of a node; none for the local machine."""
    there = facts.cluster
    if there is None:
        return None
    return ClusterStatus(
        state=there.state,
        reason=there.reason,
        since=there.since,
        taints=there.keeps_off,
        spot="spot" in there.labels,
        autoscaling=there.autoscaling,
        mig_config=there.mig_config,
        mig_state=there.mig_state,
        sharing_config=there.sharing_config,
    )


def free_capacity(node: Node, running: Iterable[JobRow]) -> FreeResources:
    """Return what the `running` jobs, and others than this platform, leave free of a node."""
    others = node.others or HeldByOthers()
    cpus, memory_bytes, held = (
        node.cpus - others.cpus,
        node.memory_bytes - others.memory_bytes,
        Counter[str](),
    )
    for row in running:
        for placed in row.placements:
            if placed.node == node.name:
                cpus -= row.spec.cpus
                memory_bytes -= row.spec.memory_bytes or 0
                held.update(dict.fromkeys(placed.gpus, row.spec.gpu_milli))
    for profile, count in others.gpus.items():
        open_ones = [gpu.id for gpu in node.gpus if (gpu.profile or "") == profile and gpu.id not in held]
        held.update(dict.fromkeys(open_ones[-count:] if count else (), WHOLE_GPU))
    left = tuple(max(0, WHOLE_GPU - held[gpu.id]) for gpu in node.gpus)
    return FreeResources(
        cpus=max(0, cpus),
        memory_bytes=max(0, memory_bytes),
        gpus=left.count(WHOLE_GPU),
        gpu_milli=left,
    )
