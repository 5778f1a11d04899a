"""Operations on the platform as a whole: its status, cleanup, metrics and nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Protocol

from falaj.control import lease
from falaj.governance.bootstrap import count_users
from falaj.governance.identity.tokens import forget_links
from falaj.governance.operations import idempotency, outbox
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.ports.hardware import NodeFacts
from falaj.records.governance.identity import Role
from falaj.records.platform import CleanupResult, MetricsText, PlatformFacts
from falaj.records.scheduling.hardware import FreeResources, Machine
from falaj.records.scheduling.snapshot import WHOLE_GPU, Node
from falaj.training import store
from falaj.training.store import JobRow
from falaj.version import VERSION

KEYS_KEPT = timedelta(days=7)
EVENTS_KEPT = timedelta(days=30)


class PlatformService:
    """The status of the platform for everyone, its metrics and cleanup for operators."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @operation("platform.status", resource="platform", mode=Mode.READ, allow="anyone")
    def status(self) -> PlatformFacts:
        """Show the version, the acting controller and the zones."""
        call = current_call()
        return PlatformFacts(
            version=VERSION,
            controller=lease.held_by(call.tx, now=call.now),
            zones=tuple(self.gate.zones.all()),
            users=count_users(call.tx),
        )

    @operation("platform.cleanup", resource="platform", allow=Role.OPERATOR)
    def cleanup(self) -> CleanupResult:
        """Delete old idempotency keys, events and sign-in links. The controller calls this periodically."""
        call = current_call()
        return CleanupResult(
            keys=idempotency.forget(call.tx, before=call.now - KEYS_KEPT),
            events=outbox.forget(call.tx, before=call.now - EVENTS_KEPT),
            links=forget_links(call.tx, before=call.now),
        )

    @operation("platform.metrics", resource="platform", mode=Mode.HOT, allow={Role.OPERATOR, Role.AUDITOR})
    def metrics(self) -> MetricsText:
        """Return the metrics of the answering process in the Prometheus text format."""
        from prometheus_client import generate_latest

        return MetricsText(text=generate_latest().decode())


class NodeSource(Protocol):
    """Provides the facts of the nodes."""

    def machines(self) -> tuple[tuple[NodeFacts, Node], ...]: ...


class Nodes:
    """The nodes that jobs run on."""

    def __init__(self, gate: Gate, source: NodeSource) -> None:
        self.gate = gate
        self._source = source

    @operation("nodes.list", resource="platform", mode=Mode.READ, allow="anyone")
    def list(self) -> tuple[Machine, ...]:
        """List the nodes: their CPUs, memory, GPUs and networks, and what is free now."""
        tx = current_call().tx
        running = [store.job_row(tx, each.id) for each in store.running(tx)]
        return tuple(machine_record(facts, node, running) for facts, node in self._source.machines())


def machine_record(facts: NodeFacts, node: Node, running: Sequence[JobRow]) -> Machine:
    """Return the record of a node: its hardware, and what the `running` jobs leave free."""
    return Machine(
        node=node,
        free=free_capacity(node, running),
        cpu_model=facts.cpu_model,
        isa=facts.isa,
        sockets=facts.sockets,
        numa_nodes=facts.numa_nodes,
        driver=facts.driver,
        cards=facts.cards,
        rdma=facts.rdma,
        gpu_fault=facts.gpu_fault,
    )


def free_capacity(node: Node, running: Iterable[JobRow]) -> FreeResources:
    """Return what the `running` jobs leave free of a node."""
    cpus, memory_bytes, held = node.cpus, node.memory_bytes, Counter[str]()
    for row in running:
        for placed in row.placements:
            if placed.node == node.name:
                cpus -= row.spec.cpus
                memory_bytes -= row.spec.memory_bytes or 0
                held.update(dict.fromkeys(placed.gpus, row.spec.gpu_milli))
    left = tuple(max(0, WHOLE_GPU - held[gpu.id]) for gpu in node.gpus)
    return FreeResources(
        cpus=max(0, cpus),
        memory_bytes=max(0, memory_bytes),
        gpus=left.count(WHOLE_GPU),
        gpu_milli=left,
    )
