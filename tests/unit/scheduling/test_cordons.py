"""A cordoned node starts no jobs, and holds up none."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from falaj.records.scheduling.snapshot import Affinity, Evict, Reason, Snapshot, Start, Wait
from falaj.scheduling import decide, explain
from workloads import for_any, job, node, started, with_pending, world, worlds

BIG = node("big", cpus=32, gpus=8, cordoned=True)
SMALL = node("small", cpus=8, gpus=1)


def test_a_cordoned_node_starts_no_job() -> None:
    (decision,) = decide(world(node("a", cordoned=True), node("b"), pending=[job("next")]))

    assert isinstance(decision, Start)
    assert [placed.node for placed in decision.placements] == ["b"]


def test_a_job_that_only_a_cordoned_node_could_hold_waits_and_holds_up_nobody() -> None:
    first, second = job("large", gpus=4, age=9, priority=5), job("other", cpus=8)

    decisions = {each.job: each for each in decide(world(BIG, SMALL, pending=[first, second]))}

    assert decisions["large"] == Wait(job=first.job, reason=Reason.CORDONED)
    assert isinstance(decisions["other"], Start)


def test_the_explanation_names_the_cordoned_node_and_what_would_help() -> None:
    explanation = explain(world(BIG, SMALL, pending=[job("large", gpus=4)]), "large")

    assert explanation.reason is Reason.CORDONED
    assert explanation.words == (
        "needs 1 CPU, 4 GPUs, for which the nodes that start jobs are too small or too few; cordoned: big"
    )
    assert "node big uncordoned" in explanation.would_start
    assert "one more node like big" in explanation.would_start


def test_a_job_that_fits_no_node_at_all_is_too_large_and_not_cordoned() -> None:
    explanation = explain(world(BIG, SMALL, pending=[job("huge", gpus=9)]), "huge")

    assert explanation.reason is Reason.TOO_LARGE


def test_an_affinity_that_no_node_matches_is_named_before_cordons() -> None:
    pending = [job("picky", affinity=Affinity(labels=frozenset({"nowhere"})))]

    assert explain(world(BIG, SMALL, pending=pending), "picky").reason is Reason.AFFINITY


def test_nobody_is_evicted_from_a_cordoned_node() -> None:
    busy = started(world(node("n1"), pending=[job("runs", cpus=8)]))
    closed = busy.model_copy(update={"nodes": (node("n1", cordoned=True),)})

    decisions = decide(with_pending(closed, job("urgent", cpus=8, priority=9)))

    assert not [each for each in decisions if isinstance(each, Evict)]


@for_any(worlds(), st.sets(st.integers(0, 5)))
def test_no_start_is_placed_on_a_cordoned_node(snapshot: Snapshot, chosen: set[int]) -> None:
    nodes = tuple(
        each.model_copy(update={"cordoned": index in chosen}) for index, each in enumerate(snapshot.nodes)
    )
    cordoned = {each.name for each in nodes if each.cordoned}

    decisions = decide(snapshot.model_copy(update={"nodes": nodes}))

    placed = {spot.node for each in decisions if isinstance(each, Start) for spot in each.placements}
    assert not placed & cordoned


@pytest.mark.slow
@for_any(worlds(), st.sets(st.integers(0, 5)))
def test_a_cordoned_node_counts_as_one_that_is_not_there(snapshot: Snapshot, chosen: set[int]) -> None:
    """Where no job runs, the same jobs start on the same nodes; only the reasons of those that wait may differ."""
    idle = snapshot.model_copy(update={"running": ()})
    nodes = tuple(
        each.model_copy(update={"cordoned": index in chosen}) for index, each in enumerate(idle.nodes)
    )
    without = tuple(each for each in nodes if not each.cordoned)

    def starts(given: Snapshot) -> set[str]:
        return {each.job for each in decide(given) if isinstance(each, Start)}

    assert starts(idle.model_copy(update={"nodes": nodes})) == starts(
        idle.model_copy(update={"nodes": without})
    )
