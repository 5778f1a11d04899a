"""The NodeInventory contract, over this machine. tests/kubernetes collects it again over the nodes of a cluster."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise

import pytest

from falaj.drivers.machine.inventory import LocalMachine
from falaj.ports.machine.hardware import ClusterNode, NodeFacts, NodeInventory
from falaj.records.governance.residency import Zone
from falaj.records.scheduling.snapshot import HeldByOthers, Node, Queue, Request, Resources, Snapshot, Start
from falaj.scheduling import decide, node_from

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
HERE = Zone(name="local", jurisdiction="AE")


@pytest.fixture
def inventory() -> NodeInventory:
    return LocalMachine()


def ready(inventory: NodeInventory) -> list[NodeFacts]:
    """Return the nodes that take jobs."""
    return [each for each in inventory.nodes() if (each.cluster or ClusterNode()).state == "ready"]


def decided(node: Node, each: Resources) -> Start | None:
    """Return where a job of one replica starts on a node; none if it waits."""
    request = Request(job="job", each=each, submitted_at=NOW)
    queues = (Queue(name="default"),)
    (made,) = decide(Snapshot(now=NOW, nodes=(node,), queues=queues, pending=(request,)))
    return made if isinstance(made, Start) else None


def test_there_is_a_node_with_a_plausible_size(inventory: NodeInventory) -> None:
    found = ready(inventory)

    assert found
    for each in found:
        assert 1 <= each.cpus <= 4096
        assert 2**26 <= each.memory_bytes <= 2**50


def test_names_of_nodes_and_gpus_are_unique_and_fit_the_platform(inventory: NodeInventory) -> None:
    found = inventory.nodes()

    names, gpus = [each.name for each in found], [gpu.id for each in found for gpu in each.gpus]
    assert len(set(names)) == len(names)
    assert len(set(gpus)) == len(gpus)
    for each in found:
        node_from(each, zone=HERE)  # a Node refuses names that are none, and GPUs that stand twice


def test_reading_again_without_a_change_returns_the_same(inventory: NodeInventory) -> None:
    assert [_lasting(each) for each in inventory.nodes()] == [_lasting(each) for each in inventory.nodes()]


def test_a_caller_that_changes_the_list_changes_it_for_nobody_else(inventory: NodeInventory) -> None:
    first = inventory.nodes()
    names = [each.name for each in first]

    first.clear()

    assert [each.name for each in inventory.nodes()] == names


def test_gpus_are_there_or_it_is_said_why_or_the_node_has_none(inventory: NodeInventory) -> None:
    for each in ready(inventory):
        assert each.gpus or each.gpu_fault or each.cluster is not None
        for gpu in each.gpus:
            assert gpu.memory_bytes >= 0
            assert gpu.profile is None or gpu.profile


def test_gpus_of_one_island_stand_side_by_side(inventory: NodeInventory) -> None:
    for each in inventory.nodes():
        islands = [gpu.island for gpu in each.gpus]
        changes = sum(one != other for one, other in pairwise(islands))
        assert changes == max(0, len(set(islands)) - 1)


def test_a_node_says_what_others_hold_of_it_and_no_more_than_it_has(inventory: NodeInventory) -> None:
    for each in ready(inventory):
        held = each.others or HeldByOthers()
        assert held.cpus <= each.cpus
        assert held.memory_bytes <= each.memory_bytes
        profiles = [gpu.profile or "" for gpu in each.gpus]
        assert all(count <= profiles.count(profile) for profile, count in held.gpus.items())


def test_the_scheduler_places_what_is_free_and_nothing_larger(inventory: NodeInventory) -> None:
    facts = max(ready(inventory), key=lambda each: each.cpus - (each.others or HeldByOthers()).cpus)
    node, held = node_from(facts, zone=HERE), facts.others or HeldByOthers()
    free = facts.cpus - held.cpus

    fits = decided(node, Resources(cpus=free, memory_bytes=facts.memory_bytes - held.memory_bytes))

    assert fits is not None
    assert fits.placements[0].node == facts.name
    assert decided(node, Resources(cpus=free + 1)) is None
    whole = [gpu for gpu in facts.gpus if gpu.profile is None]
    left = len(whole) - held.gpus.get("", 0)
    if left:
        started = decided(node, Resources(gpus=left))
        assert started is not None
        assert set(started.placements[0].gpus) <= {gpu.id for gpu in whole}
    assert decided(node, Resources(gpus=left + 1)) is None


def test_labels_that_jobs_ask_for_are_names(inventory: NodeInventory) -> None:
    for each in inventory.nodes():
        labels = node_from(each, zone=HERE).labels
        assert all(label == label.lower() and " " not in label for label in labels)


def _lasting(facts: NodeFacts) -> NodeFacts:
    """Return the facts without what may change from one moment to the next."""
    return replace(facts, others=None, rdma=())
