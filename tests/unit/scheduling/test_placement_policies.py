"""Invariants of all placement policies, and the preferences of ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import strategies as st

import placement_policies
from falaj.errors import Conflict
from falaj.records.scheduling.snapshot import Demand, Gpu, Node
from falaj.scheduling.placement.fleet import Fleet, GpuAssignment, PlacementPolicy
from falaj.scheduling.placement.fragmentation import FragmentationMeasure
from falaj.scheduling.placement.least_fragmentation import LeastFragmentation
from workloads import for_any

Make = Callable[[Fleet, Mapping[Demand, int]], PlacementPolicy]
SCORES = (
    placement_policies.best_fit,
    placement_policies.best_fit_by_gpus,
    placement_policies.smallest_dot_product,
    placement_policies.largest_dot_product,
    placement_policies.packing,
)
POLICIES: list[Make] = [
    LeastFragmentation,
    lambda fleet, _: placement_policies.FirstFit(fleet),
    *((lambda fleet, _, score=score: placement_policies.LowestScore(fleet, score)) for score in SCORES),
]
any_policy = st.sampled_from(POLICIES)


def node(name: str, *, cpus: int = 8, memory: int = 8, models: Sequence[str] = ()) -> Node:
    gpus = tuple(Gpu(id=f"{name}-{i}", model=model, memory_bytes=0) for i, model in enumerate(models))
    return Node(name=name, zone="here", jurisdiction="AE", cpus=cpus, memory_bytes=memory, gpus=gpus)


def share(milli: int, *, cpus: int = 0, memory: int = 0, models: frozenset[str] | None = None) -> Demand:
    return Demand(cpus_milli=cpus, memory_bytes=memory, gpus=1, gpu_milli=milli, gpu_models=models)


def whole(gpus: int, *, cpus: int = 0, memory: int = 0, models: frozenset[str] | None = None) -> Demand:
    return Demand(cpus_milli=cpus, memory_bytes=memory, gpus=gpus, gpu_models=models if gpus else None)


# ------------------------------------------------------------------------------------------- properties

some_models = st.sampled_from([None, None, frozenset({"T4"}), frozenset({"T4", "V100"}), frozenset({"A10"})])
sizes = {"cpus": st.sampled_from([0, 500, 1000, 2500]), "memory": st.integers(0, 3), "models": some_models}
demands = st.builds(share, st.sampled_from([1, 250, 400, 500, 999]), **sizes) | st.builds(
    whole, st.integers(0, 3), **sizes
)
tasks = st.lists(demands, max_size=25)
fleets = st.lists(
    st.builds(
        dict,
        cpus=st.integers(0, 6),
        memory=st.integers(0, 8),
        models=st.lists(st.sampled_from(["T4", "V100"]), max_size=4),
    ),
    max_size=4,
).map(lambda given: [node(f"n{i}", **each) for i, each in enumerate(given)])


def place_all(make: Make, nodes: Sequence[Node], demands: Sequence[Demand]) -> list[GpuAssignment | None]:
    fleet = Fleet(nodes)
    policy = make(fleet, Counter(demands))
    found = []
    for demand in demands:
        found.append(policy.choose(demand))
        if found[-1]:
            fleet.take(demand, found[-1])
    return found


def possible(fleet: Fleet, demand: Demand) -> list[GpuAssignment]:
    """Return every allocation where the task fits, tried one by one."""
    found = []
    for index, there in enumerate(fleet.nodes):
        if fleet.cpus[index] < demand.cpus_milli or fleet.memory[index] < demand.memory_bytes:
            continue
        will_do = [
            gpu
            for gpu, card in enumerate(there.gpus)
            if fleet.gpus[index, gpu] >= demand.gpu_milli
            if demand.gpu_models is None or card.model in demand.gpu_models
        ]
        found += [GpuAssignment(index, gpus) for gpus in combinations(will_do, demand.gpus)]
    return found


@for_any(any_policy, fleets, tasks)
def test_no_node_and_no_gpu_is_overcommitted(make: Make, nodes: list[Node], demands: list[Demand]) -> None:
    cpus: Counter[int] = Counter()
    memory: Counter[int] = Counter()
    milli: Counter[tuple[int, int]] = Counter()
    for demand, place in zip(demands, place_all(make, nodes, demands), strict=True):
        if place:
            cpus[place.node] += demand.cpus_milli
            memory[place.node] += demand.memory_bytes
            milli.update({(place.node, gpu): demand.gpu_milli for gpu in place.gpus})

    assert all(used <= nodes[index].cpus * 1000 for index, used in cpus.items())
    assert all(used <= nodes[index].memory_bytes for index, used in memory.items())
    assert all(used <= 1000 and gpu < len(nodes[index].gpus) for (index, gpu), used in milli.items())


@for_any(any_policy, fleets, tasks)
def test_a_task_goes_where_it_fits_and_waits_only_if_it_fits_nowhere(
    make: Make, nodes: list[Node], demands: list[Demand]
) -> None:
    fleet = Fleet(nodes)
    policy = make(fleet, Counter(demands))

    for demand in demands:
        there = possible(fleet, demand)
        chosen = policy.choose(demand)
        if chosen is None:
            assert there == []
        else:
            assert GpuAssignment(chosen.node, tuple(sorted(chosen.gpus))) in there
            fleet.take(demand, chosen)


@for_any(any_policy, fleets, tasks, st.randoms())
def test_the_same_choices_whatever_the_order_of_the_nodes(
    make: Make, nodes: list[Node], demands: list[Demand], random: st.random.Random
) -> None:
    shuffled = random.sample(nodes, len(nodes))

    assert place_all(make, shuffled, demands) == place_all(make, nodes, demands)


@for_any(any_policy, fleets, tasks)
def test_choosing_changes_nothing(make: Make, nodes: list[Node], demands: list[Demand]) -> None:
    fleet = Fleet(nodes)
    policy = make(fleet, Counter(demands))

    for demand in demands:
        assert policy.choose(demand) == policy.choose(demand)

    assert fleet.changes == 0
    assert np.array_equal(fleet.gpus, Fleet(nodes).gpus)


# ------------------------------------------------------------------------------------------- our policy


@for_any(fleets, tasks, st.randoms())
def test_cached_scores_of_our_policy_equal_fresh_ones(
    nodes: list[Node], demands: list[Demand], random: st.random.Random
) -> None:
    fleet, workload = Fleet(nodes), Counter(demands)
    policy = LeastFragmentation(fleet, workload)
    running: list[tuple[Demand, GpuAssignment]] = []

    for demand in demands:
        chosen = policy.choose(demand)
        assert chosen == LeastFragmentation(fleet, workload).choose(demand)
        if chosen:
            fleet.take(demand, chosen)
            running.append((demand, chosen))
        if running and random.random() < 0.3:
            fleet.give(*running.pop(random.randrange(len(running))))


in_use = st.lists(
    st.lists(st.sampled_from([0, 0, 250, 500, 600]), min_size=1, max_size=3), min_size=1, max_size=3
)
gpu_tasks = st.builds(share, st.sampled_from([250, 400, 500, 750])) | st.builds(whole, st.integers(1, 3))


@for_any(in_use, gpu_tasks, st.lists(gpu_tasks, min_size=1, max_size=4))
def test_our_policy_is_optimal_for_a_single_step(
    used: list[list[int]], demand: Demand, workload: list[Demand]
) -> None:
    fleet = Fleet([node(f"n{i}", models=["T4"] * len(gpus)) for i, gpus in enumerate(used)])
    for index, gpus in enumerate(used):
        for gpu, milli in enumerate(gpus):
            if milli:
                fleet.take(share(milli), GpuAssignment(index, (gpu,)))
    by_gpus = {each: count * each.gpus * each.gpu_milli for each, count in Counter(workload).items()}
    measure = FragmentationMeasure(fleet, by_gpus)

    def after(place: GpuAssignment) -> float:
        fleet.take(demand, place)
        left = measure.fragmented_gpus()
        fleet.give(demand, place)
        return left

    chosen = LeastFragmentation(fleet, Counter(workload)).choose(demand)

    if chosen:
        assert after(chosen) == pytest.approx(min(after(place) for place in possible(fleet, demand)))


def test_a_share_joins_another_rather_than_break_a_whole_gpu() -> None:
    fleet = Fleet([node("n1", models=["T4"]), node("n2", models=["T4"])])
    fleet.take(share(500), GpuAssignment(1, (0,)))

    policy = LeastFragmentation(fleet, {share(500): 1, whole(1): 1})

    assert policy.choose(share(500)) == GpuAssignment(1, (0,))


def test_a_pair_of_gpus_is_taken_where_no_single_one_is_left_over() -> None:
    fleet = Fleet([node("n1", models=["T4"] * 3), node("n2", models=["T4"] * 2)])

    policy = LeastFragmentation(fleet, {whole(2): 1})

    assert policy.choose(whole(2)) == GpuAssignment(1, (0, 1))


def test_a_task_without_gpus_leaves_the_cpus_beside_free_gpus_to_others() -> None:
    fleet = Fleet([node("n1", cpus=2, models=["T4"]), node("n2", cpus=8, models=["T4"])])

    policy = LeastFragmentation(fleet, {whole(1, cpus=2000): 1, whole(0, cpus=2000): 1})

    assert policy.choose(whole(0, cpus=2000)) == GpuAssignment(1)


def test_a_workload_without_gpu_tasks_is_placed() -> None:
    fleet = Fleet([node("n1", cpus=1), node("n2", cpus=2)])

    assert LeastFragmentation(fleet, {whole(0): 1}).choose(whole(0, cpus=2000)) == GpuAssignment(1)


# ------------------------------------------------------------------------------------------------ fleet


@pytest.mark.parametrize(
    ("demand", "place"),
    [
        (share(501), GpuAssignment(0, (0,))),
        (whole(2), GpuAssignment(0, (0, 1))),
        (whole(2), GpuAssignment(0, (1, 1))),
        (whole(2), GpuAssignment(0, (1,))),
        (share(1), GpuAssignment(0, (2,))),
        (share(1, models=frozenset({"V100"})), GpuAssignment(0, (1,))),
        (share(1, cpus=8001), GpuAssignment(0, (1,))),
        (share(1, memory=9), GpuAssignment(0, (1,))),
    ],
)
def test_an_allocation_where_the_task_does_not_fit_is_refused(demand: Demand, place: GpuAssignment) -> None:
    fleet = Fleet([node("n1", models=["T4", "T4"]), node("n2", models=["T4", "T4", "T4"])])
    fleet.take(share(500), GpuAssignment(0, (0,)))
    before = fleet.gpus.copy()

    with pytest.raises(Conflict, match="does not fit on node n1"):
        fleet.take(demand, place)

    assert np.array_equal(fleet.gpus, before)


@pytest.mark.parametrize("place", [GpuAssignment(0, (1,)), GpuAssignment(1, (0,)), GpuAssignment(0, ())])
def test_ending_a_task_that_does_not_run_is_refused(place: GpuAssignment) -> None:
    fleet = Fleet([node("n1", models=["T4", "T4"]), node("n2", models=["T4"])])
    fleet.take(share(500), GpuAssignment(0, (0,)))

    with pytest.raises(Conflict, match="does not run"):
        fleet.give(share(500), place)
