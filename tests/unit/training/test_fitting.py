"""A training that no machine could hold is refused before it waits, with the number and the nearest way that fits."""

from __future__ import annotations

from typing import Any

import pytest

from falaj.errors import InvalidInput
from falaj.records.scheduling import Gpu
from falaj.records.training import Estimate, JobState, TrainingWay
from job_ground import NODE, JobGround

GIB = 1 << 30
TWO_CARDS = NODE.model_copy(
    update={
        "gpus": tuple(Gpu(id=f"GPU-{each}", model="H200", memory_bytes=100 * GIB) for each in range(2)),
        "shares": True,
    }
)


@pytest.fixture
def ground(light_ground: JobGround) -> JobGround:
    light_ground.machine.node = TWO_CARDS
    return light_ground


def test_what_fits_is_let_in_and_shown(ground: JobGround) -> None:
    estimate = estimated(way(90))

    job = ground.submit(gpus=1, estimate=estimate)

    assert job.state is JobState.QUEUED
    assert job.spec.estimate == estimate


def test_what_no_gpu_could_hold_is_refused_with_the_number_and_what_fits(ground: JobGround) -> None:
    ways = way(212), way(205, micro_batches=8), way(110, processes=2, layout="fsdp 2", as_asked=False)
    nearest = way(61, processes=2, layout="fsdp 2", precision="bf16", as_asked=False)

    fault = refused(ground, gpus=1, estimate=estimated(*ways, nearest))

    assert fault.where == "spec.estimate"
    assert fault.given == (
        "212 GiB a GPU, one process, fp32; at the least 205 GiB, one process, fp32, accumulate=8"
    )
    assert fault.allowed == "at most 92 GiB a GPU: the largest GPU has 100 GiB"
    assert fault.fix == "fsdp 2, bf16 takes 61 GiB a GPU: --processes 2 --gpus 2"


def test_what_a_script_comes_to_by_itself_is_let_in(ground: JobGround) -> None:
    both = way(120, processes=2, layout="ddp 2"), way(70, processes=2, layout="fsdp 2")

    assert ground.submit(gpus=2, framework="torch", processes=2, estimate=estimated(*both))
    chosen = both[0], both[1].model_copy(update={"as_asked": False})
    fault = refused(ground, gpus=2, framework="torch", processes=2, estimate=estimated(*chosen))
    assert fault.fix == "fsdp 2, fp32 takes 70 GiB a GPU"


def test_a_plan_for_more_gpus_than_there_are_is_no_way_out(ground: JobGround) -> None:
    ways = way(212), way(50, processes=4, layout="fsdp 4", as_asked=False)

    fault = refused(ground, gpus=1, estimate=estimated(*ways))

    assert fault.fix == "a smaller model or batch: fsdp 4, fp32 still takes 50 GiB a GPU"


def test_a_part_of_a_gpu_has_a_part_of_its_memory(ground: JobGround) -> None:
    assert ground.submit(gpus=1, gpu_milli=500, estimate=estimated(way(45)))

    fault = refused(ground, gpus=1, gpu_milli=500, estimate=estimated(way(60)))

    assert fault.allowed == "at most 46 GiB a GPU: the part of a GPU that it asks for has 50 GiB"
    assert fault.fix == "one process, fp32 takes 60 GiB a GPU: --gpus 1"


def test_processes_on_one_gpu_share_its_memory(ground: JobGround) -> None:
    two = way(60, processes=2, layout="ddp 2")

    fault = refused(ground, gpus=1, framework="torch", processes=2, estimate=estimated(two))

    assert "50 GiB, shared by 2 processes on 1" in (fault.allowed or "")
    assert fault.fix == "ddp 2, fp32 takes 60 GiB a process: --gpus 2"


def test_data_that_lies_on_the_gpu_counts_if_it_is_small_beside_it(ground: JobGround) -> None:
    beside, elsewhere = (
        estimated(way(85)).model_copy(update={"data_bytes": size * GIB}) for size in (20, 30)
    )

    assert ground.submit(gpus=1, estimate=elsewhere)
    refused(ground, gpus=1, estimate=beside)


def test_without_gpus_memory_is_what_is_asked_for_or_what_the_machine_has(ground: JobGround) -> None:
    estimate = estimated(way(6)).model_copy(update={"device": "cpu"})
    assert ground.submit(estimate=estimate)

    fault = refused(ground, memory_bytes=4 * GIB, estimate=estimate)

    assert fault.allowed == "at most 3.68 GiB a process: what the job asks for has 4 GiB"
    assert fault.fix == "one process, fp32 takes 6 GiB a process: --memory 7GiB"
    larger = estimated(way(9)).model_copy(update={"device": "cpu"})
    assert "the largest machine here has 8 GiB" in (refused(ground, estimate=larger).allowed or "")


def test_a_list_shows_only_the_way_that_was_asked_for(ground: JobGround) -> None:
    ground.submit(gpus=1, estimate=estimated(way(9), way(8, micro_batches=2)))

    (job,) = ground.jobs.list().items

    assert job.spec.estimate is not None
    assert job.spec.estimate.ways == (way(9),)


def estimated(*ways: TrainingWay) -> Estimate:
    sizes = dict.fromkeys(("parameters", "gradients", "state", "activations"), GIB)
    amounts: dict[str, Any] = {f"{name}_bytes": size for name, size in sizes.items()}
    return Estimate(device="cuda", batch_size=32, method="traced", ways=ways, **amounts)


def way(gib: int, **fields: Any) -> TrainingWay:
    plain: dict[str, Any] = {"processes": 1, "layout": "one process", "precision": "fp32", "micro_batches": 1}
    return TrainingWay(**plain | {"as_asked": True, "peak_bytes": gib * GIB} | fields)


def refused(ground: JobGround, **spec: Any) -> Any:
    with pytest.raises(InvalidInput, match="does not fit in the memory of any machine here") as refusal:
        ground.submit(**spec)
    (fault,) = refusal.value.faults
    return fault
