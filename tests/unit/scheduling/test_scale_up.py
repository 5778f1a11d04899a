"""Which waiting jobs ask an autoscaler for nodes, and for which."""

from __future__ import annotations

from falaj.records.scheduling.scale_up import ScaleUpHint
from falaj.records.scheduling.snapshot import Affinity, Node, Queue, Quota, Resources
from falaj.scheduling.decision.scale_up import nodes_wanted
from workloads import job, node, started, with_pending, world

BUSY = started(world(node("n1", cpus=8, gpus=2), node("n2", cpus=2), pending=[job("runs", cpus=8, gpus=2)]))


def test_a_job_that_waits_for_room_asks_for_nodes_like_the_smallest_that_could_take_it() -> None:
    waiting = with_pending(BUSY, job("small", cpus=2, age=9), job("gpu", cpus=2, gpus=1, replicas=2, age=8))

    assert nodes_wanted(waiting, limit=10) == (
        ScaleUpHint(job="gpu", pods=2, each=Resources(cpus=2, gpus=1), like="n1"),
    )  # the small one starts on n2


def test_jobs_that_would_not_use_the_nodes_ask_for_none() -> None:
    for_quota = BUSY.model_copy(update={"queues": (Queue(name="default", quota=Quota(cpus=8)),)})
    label = job("label", cpus=8, only=["DE"])
    choosy = job("choosy", cpus=8, affinity=Affinity(labels=frozenset({"fast"})))

    assert nodes_wanted(with_pending(for_quota, job("quota", cpus=8)), limit=10) == ()
    assert nodes_wanted(with_pending(BUSY, label, choosy, job("huge", cpus=99)), limit=10) == ()
    assert nodes_wanted(BUSY, limit=10) == ()


def test_a_gang_that_the_nodes_are_too_few_for_asks_for_them_unless_its_quota_is_too_small() -> None:
    gang = job("gang", cpus=2, gpus=2, replicas=3)
    small = BUSY.model_copy(update={"queues": (Queue(name="default", quota=Quota(gpus=4)),)})

    assert [(each.job, each.like) for each in nodes_wanted(with_pending(BUSY, gang), limit=9)] == [
        ("gang", "n1")
    ]
    assert nodes_wanted(with_pending(small, gang), limit=9) == ()


def test_the_bound_holds_for_the_pods_of_all_jobs_in_the_order_of_the_queue() -> None:
    full = started(world(node("n1", cpus=8), pending=[job("runs", cpus=8)]))
    waiting = with_pending(
        full, *(job(f"j{n}", cpus=2, replicas=replicas, age=9 - n) for n, replicas in enumerate((2, 3, 1)))
    )

    assert [(each.job, each.pods) for each in nodes_wanted(waiting, limit=4)] == [("j0", 2), ("j2", 1)]
    assert nodes_wanted(waiting, limit=0) == ()


def test_of_several_clusters_the_best_that_the_label_permits_is_asked() -> None:
    def of(cluster: str, **other: object) -> Node:
        return node(f"{cluster}.n", cpus=4, cluster=cluster, **other)

    nodes = of("home"), of("cloud", burst=True), of("far", jurisdiction="DE")
    busy = started(world(*nodes, pending=[job(name, cpus=4) for name in "abc"]))
    waiting = with_pending(busy, job("here", cpus=4, age=2), job("there", cpus=4, only=["DE"], age=1))

    found = {each.job: (each.cluster, each.like) for each in nodes_wanted(waiting, limit=10)}

    assert found == {"here": ("far", "far.n"), "there": ("far", "far.n")}
