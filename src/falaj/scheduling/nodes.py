"""What the hardware says of a machine, as a node that jobs can be placed on."""

from __future__ import annotations

import re
from collections.abc import Iterable

from falaj.ports.hardware import NodeFacts
from falaj.records.governance.residency import Zone
from falaj.records.scheduling.hardware import RdmaPort
from falaj.records.scheduling.snapshot import Node


def node_from(facts: NodeFacts, *, zone: Zone, pool: str = "default", labels: Iterable[str] = ()) -> Node:
    """The node, with the labels given and those that its hardware earns."""
    return Node(
        name=facts.name,
        zone=zone.name,
        jurisdiction=zone.jurisdiction,
        cpus=facts.cpus,
        memory_bytes=facts.memory_bytes,
        gpus=facts.gpus,
        pool=pool,
        labels=frozenset(labels) | found_labels(facts),
        fabric=fabric_of(facts.rdma),
        shares=facts.shares,
    )


def found_labels(facts: NodeFacts) -> frozenset[str]:
    """isa-avx512; gpu-nvidia-h200 and cuda-9.0; nvlink, mig, mps; rdma."""
    found = {f"isa-{each}" for each in facts.isa}
    found |= {f"gpu-{spelled(card.model)}" for card in facts.cards if spelled(card.model)}
    found |= {f"cuda-{card.compute_capability}" for card in facts.cards if card.compute_capability}
    islands = [card.island for card in facts.cards]
    has = {
        "nvlink": len(set(islands)) < len(islands),
        "mig": any(card.slices for card in facts.cards),
        "mps": facts.shares,
        "rdma": any(port.is_active for port in facts.rdma),
    }
    return frozenset(found | {label for label, there in has.items() if there})


def spelled(model: str) -> str:
    """As names are: NVIDIA H100 80GB HBM3 becomes nvidia-h100-80gb-hbm3."""
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:120]


def fabric_of(ports: Iterable[RdmaPort]) -> str | None:
    """The fabric that most of the active ports are in; none: no port is in one.

    Nodes by one name see each other. The prefix of a subnet tells them apart where its manager was given one; two
    separate fabrics that both kept the prefix of the factory look like one.
    """
    found = [port.fabric for port in ports if port.is_active and port.fabric]
    if not found:
        return None
    return "ib-" + min(set(found), key=lambda each: (-found.count(each), each))
