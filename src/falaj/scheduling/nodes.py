"""Build the scheduler's node from the detected hardware of a machine."""

from __future__ import annotations

from collections.abc import Iterable

from falaj.ports.machine.hardware import ClusterNode, NodeFacts
from falaj.records.governance.residency import Zone
from falaj.records.scheduling.hardware import RdmaPort, label_part
from falaj.records.scheduling.snapshot import Node


def node_from(facts: NodeFacts, *, zone: Zone, pool: str = "default", labels: Iterable[str] = ()) -> Node:
    """Return the node, with the given labels and those derived from its hardware and from its cluster."""
    there = facts.cluster or ClusterNode()
    return Node(
        name=facts.name,
        zone=zone.name,
        jurisdiction=zone.jurisdiction,
        cpus=facts.cpus,
        memory_bytes=facts.memory_bytes,
        gpus=facts.gpus,
        pool=there.pool or pool,
        labels=frozenset(labels) | found_labels(facts) | there.labels,
        fabric=there.fabric or fabric_of(facts.rdma),
        shares=facts.shares,
        others=facts.others,
    )


def found_labels(facts: NodeFacts) -> frozenset[str]:
    """Return labels such as isa-avx512, gpu-nvidia-h200, cuda-9.0, nvlink, mig, mps and rdma."""
    found = {f"isa-{each}" for each in facts.isa}
    found |= {f"gpu-{label_part(card.model)}" for card in facts.cards if label_part(card.model)}
    found |= {f"cuda-{card.compute_capability}" for card in facts.cards if card.compute_capability}
    islands = [card.island for card in facts.cards]
    has = {
        "nvlink": len(set(islands)) < len(islands),
        "mig": any(card.slices for card in facts.cards),
        "mps": facts.shares,
        "rdma": any(port.is_active for port in facts.rdma),
    }
    return frozenset(found | {label for label, present in has.items() if present})


def fabric_of(ports: Iterable[RdmaPort]) -> str | None:
    """Return the fabric of most active ports; None if no port is in one.

    Nodes with the same fabric name reach each other over RDMA. The name is the subnet prefix, so two separate fabrics
    that both keep the default prefix look like one.
    """
    found = [port.fabric for port in ports if port.is_active and port.fabric]
    if not found:
        return None
    return "ib-" + min(set(found), key=lambda each: (-found.count(each), each))
