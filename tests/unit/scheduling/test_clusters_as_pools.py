"""Several clusters: residency first, then quota, the data's location and cost; burst capacity if no other will do."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from falaj.records.scheduling.snapshot import (
    Affinity,
    Budget,
    HeldByOthers,
    Node,
    Price,
    Queue,
    Quota,
    Reason,
    Snapshot,
    Start,
    Wait,
)
from falaj.scheduling import decide, explain
from workloads import for_any, job, node, started, with_pending, world, worlds


def of(cluster: str, name: str = "n1", *, price: float | None = None, **other: Any) -> Node:
    """Return a node of a cluster, in which a CPU and a GPU cost the same."""
    cost = None if price is None else Price(cpu=price, gpu=price)
    return node(f"{cluster}.{name}", cluster=cluster, pool=cluster, price=cost, **other)


def places(snapshot: Snapshot) -> dict[str, set[str] | Reason]:
    """Return the clusters in which each job starts, or why it waits."""
    found: dict[str, set[str] | Reason] = {}
    for each in decide(snapshot):
        if isinstance(each, Start):
            found[each.job] = {placed.node.partition(".")[0] for placed in each.placements}
        elif isinstance(each, Wait):
            found[each.job] = each.reason
    return found


def test_all_replicas_run_in_one_cluster() -> None:
    nodes = of("east", cpus=2), of("west", cpus=2), of("west", "n2", cpus=2)

    assert places(world(*nodes, pending=[job("two", cpus=2, replicas=2)])) == {"two": {"west"}}
    three = world(*nodes, pending=[job("three", cpus=2, replicas=3)])
    assert places(three) == {"three": Reason.TOO_LARGE}
    assert "2 of 3 replicas fit in one cluster" in explain(three, "three").words


def test_the_cheapest_cluster_is_taken_and_then_the_next() -> None:
    nodes = of("dear", cpus=4, gpus=2, price=9.0), of("cheap", cpus=2, gpus=1, price=1.0)

    two = [job("a", gpus=1, age=2), job("b", gpus=1, age=1)]

    assert places(world(*nodes, pending=two)) == {"a": {"cheap"}, "b": {"dear"}}


def test_the_location_of_the_data_comes_before_the_price() -> None:
    nodes = of("near", price=9.0), of("far", jurisdiction="DE", price=1.0)
    there = job("there").model_copy(update={"data_zones": frozenset({"abu-dhabi"})})

    assert places(world(*nodes, pending=[there, job("plain")])) == {"there": {"near"}, "plain": {"far"}}


def test_residency_comes_before_everything() -> None:
    nodes = of("home", cpus=1, price=9.0), of("far", jurisdiction="DE", price=1.0)
    both = [job("a", only=["AE"], age=2), job("b", only=["AE"], age=1)]
    elsewhere = [each.model_copy(update={"data_zones": frozenset({"frankfurt"})}) for each in both]

    assert places(world(*nodes, pending=elsewhere)) == {"a": {"home"}, "b": Reason.CAPACITY}


def test_quota_holds_over_all_clusters() -> None:
    nodes = of("east", cpus=4), of("west", cpus=4)
    queues = [Queue(name="default", quota=Quota(cpus=4))]
    snapshot = world(*nodes, pending=[job("a", cpus=4, age=2), job("b", cpus=4, age=1)])

    assert places(snapshot.model_copy(update={"queues": tuple(queues)})) == {"a": {"east"}, "b": Reason.QUOTA}


def test_burst_capacity_is_used_only_when_no_other_has_room_and_is_explained() -> None:
    nodes = of("home", cpus=2, price=9.0), of("cloud", cpus=8, price=0.1, burst=True)
    both = world(*nodes, pending=[job("a", cpus=2, age=2), job("b", cpus=2, age=1)])

    assert places(both) == {"a": {"home"}, "b": {"cloud"}}
    assert explain(both, "b").words == (
        "starts now on cloud.n1, burst capacity of cloud: the others could not take it"
    )
    assert "burst capacity of cloud" in explain(started(both), "b").words
    assert "burst" not in explain(both, "a").words


def test_burst_capacity_is_used_before_a_running_job_is_preempted() -> None:
    busy = started(world(of("home", cpus=2), pending=[job("low", cpus=2)]))
    nodes = (*busy.nodes, of("cloud", cpus=8, burst=True))

    snapshot = with_pending(busy.model_copy(update={"nodes": nodes}), job("high", cpus=2, priority=9))

    assert places(snapshot) == {"high": {"cloud"}}


def test_jobs_choose_a_cluster_or_avoid_burst_capacity_by_pool_and_label() -> None:
    nodes = of("home", cpus=1), of("cloud", cpus=8, burst=True, labels=frozenset({"burst"}))
    chosen, avoiding = (
        job("chosen", affinity=Affinity(pools=frozenset({"cloud"}))),
        job("avoiding", cpus=2, affinity=Affinity(avoid=frozenset({"burst"}))),
    )

    assert places(world(*nodes, pending=[chosen, avoiding])) == {
        "chosen": {"cloud"},
        "avoiding": Reason.AFFINITY,
    }


def test_a_budget_is_charged_at_the_price_of_the_cluster_and_keeps_off_dear_burst_capacity() -> None:
    nodes = of("home", cpus=1, price=1.0), of("cloud", cpus=8, price=50.0, burst=True)
    both = [job("a", age=2, limit=60, workspace="w"), job("b", age=1, limit=60, workspace="w")]
    snapshot = world(*nodes, pending=both)

    def with_money(money: float) -> Snapshot:
        return snapshot.model_copy(update={"budgets": (Budget(workspace="w", money=money),)})

    assert places(with_money(10.0)) == {"a": {"home"}, "b": Reason.CAPACITY}
    assert places(with_money(100.0)) == {"a": {"home"}, "b": {"cloud"}}
    assert places(with_money(0.5)) == {"a": Reason.BUDGET, "b": Reason.BUDGET}
    ran = started(with_money(100.0))
    there = Affinity(pools=frozenset({"cloud"}))
    assert places(with_pending(ran, job("c", limit=60, workspace="w", affinity=there))) == {
        "c": Reason.CAPACITY
    }


def test_pods_of_others_send_a_job_to_another_cluster() -> None:
    nodes = of("east", cpus=2, others=HeldByOthers(cpus=1)), of("west", cpus=2)

    assert places(world(*nodes, pending=[job("a", cpus=2)])) == {"a": {"west"}}


@for_any(worlds(), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_in_any_world_a_job_runs_in_one_cluster_and_others_keep_what_they_hold(
    drawn: Snapshot, held: list[int]
) -> None:
    nodes = tuple(
        each.model_copy(
            update={
                "cluster": ("east", "west")[index % 2],
                "burst": index % 2 == 1,
                "others": HeldByOthers(cpus=min(held[index], each.cpus)),
            }
        )
        for index, each in enumerate(drawn.nodes)
    )
    snapshot = drawn.model_copy(update={"nodes": nodes, "running": ()})
    free = {each.name: each.cpus - (each.others or HeldByOthers()).cpus for each in nodes}
    clusters = {each.name: each.cluster for each in nodes}
    requests = {each.job: each for each in snapshot.pending}

    for start in (each for each in decide(snapshot) if isinstance(each, Start)):
        assert len({clusters[placed.node] for placed in start.placements}) == 1
        for placed in start.placements:
            free[placed.node] -= requests[start.job].each.cpus

    assert min(free.values()) >= 0
