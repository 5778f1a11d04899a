"""The fragmentation of free resources for a workload, against its definition task by task."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from pydantic import ValidationError

from falaj.records.scheduling.snapshot import Demand, Gpu, Node
from falaj.scheduling.placement.fleet import Fleet, GpuAssignment
from falaj.scheduling.placement.fragmentation import FragmentationMeasure
from workloads import for_any

MODELS = ("T4", "V100")
demands = st.builds(
    lambda gpus, milli, cpus, models: Demand(
        cpus_milli=cpus,
        gpus=gpus,
        gpu_milli=milli if gpus == 1 else 1000,
        gpu_models=models if gpus else None,
    ),
    st.integers(0, 3),
    st.sampled_from([1, 300, 600, 1000]),
    st.sampled_from([0, 1000, 3000]),
    st.sampled_from([None, frozenset({"T4"})]),
)
cards = st.lists(st.tuples(st.sampled_from(MODELS), st.sampled_from([0, 100, 300, 700, 1000])), max_size=4)


def fleet_of(*nodes: tuple[int, list[tuple[str, int]]]) -> Fleet:
    """Return nodes with that many CPUs, and GPUs of a model with that many thousandths in use."""
    fleet = Fleet(
        Node(
            name=f"n{index}",
            zone="here",
            jurisdiction="AE",
            cpus=cpus,
            memory_bytes=0,
            gpus=tuple(Gpu(id=f"{i}", model=model, memory_bytes=0) for i, (model, _) in enumerate(gpus)),
        )
        for index, (cpus, gpus) in enumerate(nodes)
    )
    for index, (_, gpus) in enumerate(nodes):
        for gpu, (_, used) in enumerate(gpus):
            if used:
                fleet.take(Demand(gpus=1, gpu_milli=used), GpuAssignment(index, (gpu,)))
    return fleet


def out_of_reach(fleet: Fleet, index: int, demand: Demand) -> set[int]:
    """Return the GPUs of one node that a task cannot use."""
    cards = fleet.nodes[index].gpus
    will_do = {
        gpu
        for gpu, card in enumerate(cards)
        if fleet.gpus[index, gpu] >= demand.gpu_milli
        if demand.gpu_models is None or card.model in demand.gpu_models
    }
    starts = demand.gpus and fleet.cpus[index] >= demand.cpus_milli and len(will_do) >= demand.gpus
    return set(range(len(cards))) - (will_do if starts else set())


@for_any(st.lists(st.tuples(st.integers(0, 4), cards), max_size=3), st.lists(demands, min_size=1, max_size=6))
def test_the_measures_equal_their_definitions(
    nodes: list[tuple[int, list[tuple[str, int]]]], tasks: list[Demand]
) -> None:
    fleet = fleet_of(*nodes)
    measure = FragmentationMeasure(fleet, Counter(tasks))

    fragmented = dead = 0
    for index in range(len(nodes)):
        lost = [out_of_reach(fleet, index, task) for task in tasks]
        fragmented += sum(int(fleet.gpus[index, gpu]) for gpus in lost for gpu in gpus)
        dead += sum(int(fleet.gpus[index, gpu]) for gpu in set.intersection(*lost))

    assert measure.fragmented_gpus() == pytest.approx(fragmented / len(tasks) / 1000)
    assert measure.dead_gpus() == pytest.approx(dead / 1000)


def test_a_gpu_without_free_cpus_is_dead() -> None:
    fleet = fleet_of((0, [("T4", 0), ("T4", 700)]), (1, [("T4", 700)]))

    measure = FragmentationMeasure(fleet, {Demand(cpus_milli=1000, gpus=1, gpu_milli=300): 3})

    assert measure.dead_gpus() == pytest.approx(1.3)
    assert measure.fragmented_gpus() == pytest.approx(1.3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gpus": 2, "gpu_milli": 500}, "a share of 500 thousandths is of 1 GPU, not of 2"),
        ({"gpus": 0, "gpu_milli": 500}, "not of 0"),
        ({"gpus": 1, "gpu_milli": 0}, "gpu_milli"),
        ({"gpus": 1, "gpu_milli": 1001}, "gpu_milli"),
        ({"gpus": 1, "gpu_models": []}, "at least one model"),
        ({"gpus": 0, "gpu_models": ["T4"]}, "only for a task that asks for a GPU"),
    ],
)
def test_an_impossible_demand_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Demand.model_validate(fields)
