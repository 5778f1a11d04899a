"""What others than this platform hold of the nodes is not free, and is no reason to refuse a job."""

from __future__ import annotations

from falaj.records.scheduling.snapshot import HeldByOthers, Reason, Snapshot, Start, Wait
from falaj.scheduling import decide, explain
from workloads import job, node, started, with_pending, world


def others(cpus: int = 0, *, memory: int = 0, **gpus: int) -> HeldByOthers:
    return HeldByOthers(cpus=cpus, memory_bytes=memory * 2**30, gpus={"": gpus["gpus"]} if gpus else {})


def reasons(snapshot: Snapshot) -> dict[str, Reason | None]:
    return {
        each.job: each.reason if isinstance(each, Wait) else None
        for each in decide(snapshot)
        if isinstance(each, (Start, Wait))
    }


def test_a_gang_waits_for_what_others_hold() -> None:
    nodes = node("n1", cpus=2, others=others(1)), node("n2", cpus=2)
    gang = job("gang", cpus=2, replicas=2)

    assert reasons(world(*nodes, pending=[gang])) == {"gang": Reason.CAPACITY}
    assert reasons(world(node("n1", cpus=2), nodes[1], pending=[gang])) == {"gang": None}


def test_memory_and_gpus_of_others_count() -> None:
    by_memory = world(node("n", memory=64, others=others(memory=60)), pending=[job("a", memory=8)])
    by_gpus = world(node("n", gpus=4, others=others(gpus=3)), pending=[job("a", gpus=2), job("b", gpus=1)])

    assert reasons(by_memory) == {"a": Reason.CAPACITY}
    assert reasons(by_gpus) == {"a": Reason.CAPACITY, "b": None}


def test_gpus_of_others_are_those_that_no_job_holds() -> None:
    two = started(world(node("n", gpus=4), pending=[job("runs", gpus=2)]))
    shared = two.model_copy(update={"nodes": (node("n", gpus=4, others=others(gpus=1)),)})

    (start,) = decide(with_pending(shared, job("next", gpus=1)))

    assert isinstance(start, Start)
    taken = {gpu for running in shared.running for each in running.placements for gpu in each.gpus}
    assert not taken & set(start.placements[0].gpus)
    assert reasons(with_pending(shared, job("large", gpus=2))) == {"large": Reason.CAPACITY}


def test_a_job_that_only_others_keep_off_delays_nobody_and_is_told_so() -> None:
    snapshot = world(
        node("n", cpus=4, others=others(2, memory=1)), pending=[job("large", cpus=4, age=5), job("small")]
    )

    assert reasons(snapshot) == {"large": Reason.CAPACITY, "small": None}
    assert explain(snapshot, "large").words == (
        "needs 4 CPUs; the closest node, n, has 2 CPUs, 0 GPUs, 63 GiB free beside 2 CPUs, 1 GiB that others hold"
    )


def test_nobody_is_preempted_in_vain() -> None:
    low = started(world(node("n", cpus=4, others=others(2)), pending=[job("low", cpus=1)]))

    assert [each.kind for each in decide(with_pending(low, job("high", cpus=4, priority=9)))] == ["wait"]
    assert [each.kind for each in decide(with_pending(low, job("high", cpus=2, priority=9)))] == [
        "evict",
        "wait",
    ]
