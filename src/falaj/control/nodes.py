"""The machines that jobs run on: what each is made of, and what is free of it now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.ports.hardware import NodeFacts
from falaj.records.scheduling.hardware import FreeResources, Machine
from falaj.records.scheduling.snapshot import WHOLE_GPU, Node
from falaj.records.training.jobs import JobSpec
from falaj.training import store


class NodeSource(Protocol):
    """Where the machines are looked at."""

    def machines(self) -> tuple[tuple[NodeFacts, Node], ...]: ...


class Nodes:
    """Machines, for people who want to know where a job could run."""

    def __init__(self, gate: Gate, source: NodeSource) -> None:
        self.gate = gate
        self._source = source

    @operation("nodes.list", resource="platform", mode=Mode.READ, allow="anyone")
    def list(self) -> tuple[Machine, ...]:
        """The machines that run jobs: their CPUs, memory, GPUs and networks, and what is free now."""
        tx = current_call().tx
        running = [store.job_row(tx, each["id"]) for each in store.running(tx)]
        return tuple(machine_record(facts, node, running) for facts, node in self._source.machines())


def machine_record(facts: NodeFacts, node: Node, running: Sequence[Any]) -> Machine:
    """A machine as people see it: what it is made of, and what the jobs in the rows of `running` leave of it."""
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


def free_capacity(node: Node, running: Iterable[Any]) -> FreeResources:
    """What the jobs in the rows of `running` leave of a node; of a GPU that is gone, nothing can be held."""
    cpus, memory_bytes, held = node.cpus, node.memory_bytes, Counter[str]()
    for row in running:
        spec = JobSpec.model_validate(row["spec"])
        for placed in row["placements"] or ():
            if placed["node"] == node.name:
                cpus -= spec.cpus
                memory_bytes -= spec.memory_bytes or 0
                held.update(dict.fromkeys(placed["gpus"], spec.gpu_milli))
    left = tuple(max(0, WHOLE_GPU - held[gpu.id]) for gpu in node.gpus)
    return FreeResources(
        cpus=max(0, cpus),
        memory_bytes=max(0, memory_bytes),
        gpus=left.count(WHOLE_GPU),
        gpu_milli=left,
    )
