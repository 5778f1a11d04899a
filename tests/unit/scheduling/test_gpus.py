"""The choice of GPUs: in one island, of the right model, in fractions, and with little fragmentation."""

from __future__ import annotations

import subprocess
import sys

import pytest

from falaj.records.scheduling.snapshot import Affinity, Node, Reason, Request, Snapshot, Start, Wait
from falaj.scheduling import decide, explain
from workloads import GIB, job, node, started, with_pending, world


def gpus_of(snapshot: Snapshot) -> dict[str, list[str]]:
    return {
        decision.job: [gpu for placement in decision.placements for gpu in placement.gpus]
        for decision in decide(snapshot)
        if isinstance(decision, Start)
    }


def nodes_of(snapshot: Snapshot) -> dict[str, list[str]]:
    return {
        decision.job: [placement.node for placement in decision.placements]
        for decision in decide(snapshot)
        if isinstance(decision, Start)
    }


def reason(snapshot: Snapshot, name: str = "job") -> Reason | None:
    return next(
        (each.reason for each in decide(snapshot) if isinstance(each, Wait) and each.job == name), None
    )


# ----------------------------------------------------------------------------------------------- together


def two_islands(*pending: Request) -> Snapshot:
    """A node with GPUs 0 to 3 and 4 to 7, the first of which is in use."""
    first = world(node("n1", cpus=32, gpus=8, islands=2), pending=[job("runs", gpus=1, age=9)])
    return with_pending(started(first), *pending)


def test_a_gang_is_kept_in_one_nvlink_island() -> None:
    assert gpus_of(two_islands(job("gang", gpus=2, replicas=2))) == {
        "gang": [f"GPU-n1-{i}" for i in (4, 5, 6, 7)]
    }


def test_one_replica_is_kept_in_one_nvlink_island_the_fuller_one() -> None:
    assert gpus_of(two_islands(job("job", gpus=3))) == {"job": [f"GPU-n1-{i}" for i in (1, 2, 3)]}


def test_a_gang_that_fits_in_no_island_starts_unless_an_island_is_required() -> None:
    one_island = Affinity(island="nvlink")

    assert len(gpus_of(two_islands(job("job", gpus=6)))["job"]) == 6
    assert reason(two_islands(job("job", gpus=6, affinity=one_island))) is Reason.TOPOLOGY
    explanation = explain(two_islands(job("job", gpus=6, affinity=one_island)), "job")
    assert (
        explanation.words
        == "needs 1 CPU, 6 GPUs in one NVLink island; no NVLink island is large enough, even when idle"
    )
    assert "no requirement for one island" in explanation.would_start


def test_a_gang_that_needs_several_nodes_is_kept_in_one_fabric() -> None:
    cluster = [
        node("a1", cpus=4, fabric="ib-a"),
        node("b1", cpus=2, fabric="ib-b"),
        node("b2", cpus=2, fabric="ib-b"),
        node("c1", cpus=3),
    ]
    spread = Affinity(spread=True)

    assert nodes_of(world(*cluster, pending=[job("gang", replicas=2, affinity=spread)])) == {
        "gang": ["b1", "b2"]
    }
    across_nodes = Affinity(spread=True, island="rdma")
    three = job("job", replicas=3, affinity=across_nodes)
    assert reason(world(*cluster, pending=[three])) is Reason.TOPOLOGY


# ------------------------------------------------------------------------------------------------ affinity


POOLS = [node("g1", cpus=4, gpus=4), node("c1", cpus=16, pool="cpus", labels=frozenset({"slow"}))]


@pytest.mark.parametrize(
    ("affinity", "where"),
    [
        (Affinity(pools=frozenset({"cpus"})), "c1"),
        (Affinity(labels=frozenset({"slow"})), "c1"),
        (Affinity(avoid=frozenset({"slow"})), "g1"),
        (Affinity(near=frozenset({"web"})), "g1"),
        (Affinity(apart=frozenset({"web"})), "c1"),
    ],
)
def test_a_job_is_placed_by_its_affinity(affinity: Affinity, where: str) -> None:
    web = job("web", gpus=1, group="web")
    busy = started(world(*POOLS, pending=[web]))

    assert nodes_of(with_pending(busy, job("job", affinity=affinity))) == {"job": [where]}


def test_anti_affinity_is_symmetric() -> None:
    quiet = job("quiet", cpus=1, affinity=Affinity(apart=frozenset({"loud"})))
    busy = started(world(node("n1"), pending=[quiet]))

    assert reason(with_pending(busy, job("job", group="loud"))) is Reason.AFFINITY


def test_explanation_names_constraints_that_no_node_satisfies() -> None:
    explanation = explain(
        world(*POOLS, pending=[job("job", affinity=Affinity(pools=frozenset({"tpus"})))]), "job"
    )

    assert explanation.reason is Reason.AFFINITY
    assert explanation.words == "needs 1 CPU on nodes in pool tpus; 0 of 2 nodes match"
    assert explanation.would_start == ("no node affinity",)


# ------------------------------------------------------------------------------------ slices and fractions


def test_mig_slices_go_only_to_jobs_that_request_their_profile() -> None:
    mixed = node("n1", gpus=1, slices=2)
    pending = [
        job("slice-a", gpus=1, gpu={"gpu_profile": "1g.18gb"}, age=5),
        job("whole", gpus=1, age=4),
        job("whole-too", gpus=1, age=3),
        job("half", gpus=1, gpu={"gpu_profile": "3g.71gb"}, age=2),
    ]
    snapshot = world(mixed, pending=pending)

    assert gpus_of(snapshot) == {"slice-a": ["MIG-n1-0"], "whole": ["GPU-n1-0"]}
    assert reason(snapshot, "whole-too") is Reason.CAPACITY
    assert reason(snapshot, "half") is Reason.TOO_LARGE


def sharing(*pending: Request, machine: Node | None = None) -> Snapshot:
    return world(machine or node("n1", gpus=2, cpus=16, shares=True), pending=pending)


def test_fractions_share_a_gpu_within_its_thousandths() -> None:
    parts = [job(f"p{i}", gpus=1, gpu={"gpu_milli": 400}, age=9 - i) for i in range(5)]

    found = gpus_of(sharing(*parts))

    assert sorted(gpu for gpus in found.values() for gpu in gpus) == ["GPU-n1-0"] * 2 + ["GPU-n1-1"] * 2


def test_fractions_share_a_gpu_within_its_memory() -> None:
    parts = [
        job(f"p{i}", gpus=1, gpu={"gpu_milli": 100, "gpu_memory_bytes": 80 * GIB}, age=9 - i)
        for i in range(3)
    ]

    assert len(gpus_of(sharing(*parts))) == 2


def test_a_gpu_fraction_is_not_given_where_gpus_are_not_shared() -> None:
    snapshot = sharing(job("job", gpus=1, gpu={"gpu_milli": 500}), machine=node("n1", gpus=2))

    assert reason(snapshot) is Reason.TOO_LARGE
    assert explain(snapshot, "job").words.endswith("more than the cluster has: no node shares its GPUs")


def test_a_gpu_of_which_a_part_is_in_use_is_not_given_away_whole() -> None:
    busy = started(sharing(job("part", gpus=1, gpu={"gpu_milli": 100})))

    assert len(gpus_of(with_pending(busy, job("a", gpus=1), job("b", gpus=1)))) == 1


def test_only_requested_gpu_models_are_given() -> None:
    cluster = [node("a1", gpus=4, model="A100"), node("h1", gpus=4)]

    assert nodes_of(
        world(*cluster, pending=[job("job", gpus=1, gpu={"gpu_models": frozenset({"H200"})})])
    ) == {"job": ["h1"]}


def test_a_job_is_placed_where_it_fragments_least() -> None:
    """Best fit would break up the only node on which the large job can run."""
    cluster = [node("n1", gpus=4, cpus=64), node("n2", gpus=5, cpus=4)]
    waiting = [job("small", gpus=1, age=9), job("large", gpus=4, cpus=32, age=1)]

    assert nodes_of(world(*cluster, pending=waiting)) == {"small": ["n2"], "large": ["n1"]}


def test_a_job_without_gpus_leaves_the_cpus_that_free_gpus_need() -> None:
    tight, roomy = node("tight", cpus=4, gpus=1), node("roomy", cpus=32, gpus=2)
    on_gpus = [job(f"gpu-{i}", gpus=1, cpus=4) for i in range(3)]

    found = nodes_of(world(tight, roomy, pending=[job("plain", cpus=2, age=9), *on_gpus]))

    assert found["plain"] == ["roomy"]
    assert found.keys() == {"plain", "gpu-0", "gpu-1", "gpu-2"}


def test_numpy_is_loaded_with_the_first_job_on_a_gpu_and_not_before() -> None:
    code = "import sys, falaj.scheduling; assert 'numpy' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True)
