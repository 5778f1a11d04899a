"""What the hardware says of a machine, as a node that jobs can be placed on."""

from __future__ import annotations

from falaj.ports.hardware import NodeFacts
from falaj.records.residency import Zone
from falaj.records.scheduling import Node


def node_from(facts: NodeFacts, *, zone: Zone) -> Node:
    return Node(
        name=facts.name,
        zone=zone.name,
        jurisdiction=zone.jurisdiction,
        cpus=facts.cpus,
        memory_bytes=facts.memory_bytes,
        gpus=facts.gpus,
    )
