"""A training that fits on no node is refused at submission, with its estimate and the nearest alternative."""

from __future__ import annotations

from typing import Any

import pytest

from falaj.errors import FalajError, InvalidInput
from falaj.records.scheduling.snapshot import Gpu
from falaj.records.training.jobs import Job, JobMemoryEstimate, JobState, TrainingPlan
from job_harness import NODE, JobHarness

GIB = 1 << 30
TWO_CARDS = NODE.model_copy(
    update={
        "gpus": tuple(Gpu(id=f"GPU-{each}", model="H200", memory_bytes=100 * GIB) for each in range(2)),
        "shares": True,
    }
)
FRUGAL = NODE.model_copy(update={"name": "plain", "pool": "frugal", "labels": frozenset({"spare"})})
SMALL_CARD = NODE.model_copy(
    update={
        "name": "small",
        "pool": "small",
        "gpus": (Gpu(id="GPU-9", model="L4", memory_bytes=24 * GIB),),
    }
)


@pytest.fixture
def harness(light_harness: JobHarness) -> JobHarness:
    light_harness.machine.node = TWO_CARDS
    return light_harness


@pytest.fixture
def pools(harness: JobHarness, monkeypatch: pytest.MonkeyPatch) -> JobHarness:
    """Pools with two large GPUs, with no GPU but 8 GiB of memory, and with one small GPU."""
    nodes = TWO_CARDS.model_copy(update={"pool": "cards"}), FRUGAL, SMALL_CARD
    monkeypatch.setattr(harness.machine, "nodes", lambda: nodes)
    return harness


def test_a_job_that_fits_is_admitted_and_shown(harness: JobHarness) -> None:
    estimate = estimated(way(90))

    job = harness.submit(gpus=1, estimate=estimate)

    assert job.state is JobState.QUEUED
    assert job.spec.estimate == estimate


def test_a_job_too_large_for_every_gpu_is_refused_with_its_estimate_and_alternatives(
    harness: JobHarness,
) -> None:
    ways = way(212), way(205, micro_batches=8), way(110, processes=2, layout="fsdp 2", as_asked=False)
    nearest = way(61, processes=2, layout="fsdp 2", precision="bf16", as_asked=False)

    fault = refused(harness, gpus=1, estimate=estimated(*ways, nearest))

    assert fault.where == "spec.estimate"
    assert fault.given == (
        "212 GiB a GPU, one process, fp32; at the least 205 GiB, one process, fp32, accumulate=8"
    )
    assert fault.allowed == "at most 92 GiB a GPU: the largest GPU has 100 GiB"
    assert fault.fix == "fsdp 2, bf16 takes 61 GiB a GPU: --processes 2 --gpus 2"


def test_a_job_whose_script_chooses_a_fitting_plan_is_admitted(harness: JobHarness) -> None:
    both = way(120, processes=2, layout="ddp 2"), way(70, processes=2, layout="fsdp 2")

    assert harness.submit(gpus=2, framework="torch", processes=2, estimate=estimated(*both))
    chosen = both[0], both[1].model_copy(update={"as_asked": False})
    fault = refused(harness, gpus=2, framework="torch", processes=2, estimate=estimated(*chosen))
    assert fault.fix == "fsdp 2, fp32 takes 70 GiB a GPU"


def test_a_plan_for_more_gpus_than_exist_is_not_suggested(harness: JobHarness) -> None:
    ways = way(212), way(50, processes=4, layout="fsdp 4", as_asked=False)

    fault = refused(harness, gpus=1, estimate=estimated(*ways))

    assert fault.fix == "a smaller model or batch: fsdp 4, fp32 still takes 50 GiB a GPU"


def test_a_gpu_fraction_has_a_fraction_of_its_memory(harness: JobHarness) -> None:
    assert harness.submit(gpus=1, gpu_milli=500, estimate=estimated(way(45)))

    fault = refused(harness, gpus=1, gpu_milli=500, estimate=estimated(way(60)))

    assert fault.allowed == "at most 46 GiB a GPU: the part of a GPU that it asks for has 50 GiB"
    assert fault.fix == "one process, fp32 takes 60 GiB a GPU: --gpus 1"


def test_processes_on_one_gpu_share_its_memory(harness: JobHarness) -> None:
    two = way(60, processes=2, layout="ddp 2")

    fault = refused(harness, gpus=1, framework="torch", processes=2, estimate=estimated(two))

    assert "50 GiB, shared by 2 processes on 1" in (fault.allowed or "")
    assert fault.fix == "ddp 2, fp32 takes 60 GiB a process: --gpus 2"


def test_data_on_the_gpu_counts_if_it_is_small_relative_to_it(harness: JobHarness) -> None:
    beside, elsewhere = (
        estimated(way(85)).model_copy(update={"data_bytes": size * GIB}) for size in (20, 30)
    )

    assert harness.submit(gpus=1, estimate=elsewhere)
    refused(harness, gpus=1, estimate=beside)


def test_without_gpus_the_limit_is_the_requested_memory_or_that_of_the_node(harness: JobHarness) -> None:
    estimate = estimated(way(6)).model_copy(update={"device": "cpu"})
    assert harness.submit(estimate=estimate)

    fault = refused(harness, memory_bytes=4 * GIB, estimate=estimate)

    assert fault.allowed == "at most 3.68 GiB a process: what the job asks for has 4 GiB"
    assert fault.fix == "one process, fp32 takes 6 GiB a process: --memory 7GiB"
    larger = estimated(way(9)).model_copy(update={"device": "cpu"})
    assert "the largest machine here has 8 GiB" in (refused(harness, estimate=larger).allowed or "")


def test_small_numbers_are_readable(harness: JobHarness) -> None:
    little = on_cpu(way(0).model_copy(update={"peak_bytes": 45 << 10}))

    fault = refused(harness, memory_bytes=4 << 10, estimate=little)

    assert (fault.given, fault.allowed) == (
        "45 KiB a process, one process, fp32",
        "at most 3.68 KiB a process: what the job asks for has 4 KiB",
    )


def test_a_list_shows_only_the_requested_alternative(harness: JobHarness) -> None:
    harness.submit(gpus=1, estimate=estimated(way(9), way(8, micro_batches=2)))

    (job,) = harness.jobs.list().items

    assert job.spec.estimate is not None
    assert job.spec.estimate.ways == (way(9),)


# ----------------------------------------------------------------------------------------------- permitted nodes


def test_only_machines_that_the_job_may_run_on_count(pools: JobHarness) -> None:
    elsewhere: dict[str, Any] = {"affinity": {"pools": ["small"]}}

    with pytest.raises(InvalidInput, match="of any machine in pool small") as refusal:
        pools.submit(gpus=1, estimate=estimated(way(60)), **elsewhere)

    (fault,) = refusal.value.faults
    assert fault.allowed == "at most 22.1 GiB a GPU: the largest GPU has 24 GiB"
    assert fault.fix == "in pool cards, one process, fp32 takes 60 GiB a GPU"
    assert pools.submit(gpus=1, estimate=estimated(way(20)), **elsewhere)
    labelled = pools.submit(estimate=on_cpu(way(6)), affinity={"labels": ["spare"]})
    assert labelled.state is JobState.QUEUED


# -------------------------------------------------------------------------------------------- moves and retries


def test_a_move_to_where_it_does_not_fit_is_refused_and_changes_nothing(pools: JobHarness) -> None:
    ways = way(60), way(20, micro_batches=8, as_asked=False)
    job = pools.begin(pools.submit(gpus=1, estimate=estimated(*ways)))

    fault = not_moved(pools, job, "in pool small", to="small")

    assert fault.given == "60 GiB a GPU, one process, fp32"
    assert fault.fix == "one process, fp32, accumulate=8 takes 20 GiB a GPU"
    assert pools.jobs.move(job.id, to="cards").job.moving


def test_a_move_to_cpus_is_judged_by_host_memory(pools: JobHarness) -> None:
    large, small = (pools.submit(gpus=1, estimate=estimated(way(size))) for size in (20, 6))

    fault = not_moved(pools, large, "in pool frugal", to="cpu")

    assert fault.given == "20 GiB a process, one process, fp32; as it was estimated for a GPU"
    assert fault.allowed == "at most 7.36 GiB a process: the largest machine in pool frugal has 8 GiB"
    assert not pools.jobs.move(small.id, to="cpu").job.spec.gpus


def test_gpu_resident_data_is_not_counted_on_a_cpu(pools: JobHarness) -> None:
    estimate = estimated(way(7)).model_copy(update={"data_bytes": GIB})

    assert pools.jobs.move(pools.submit(gpus=1, estimate=estimate).id, to="cpu").job.spec.gpus == 0


def test_a_move_to_gpus_is_judged_by_gpu_memory(pools: JobHarness) -> None:
    job = pools.submit(estimate=on_cpu(way(6)), affinity={"pools": ["frugal"]})
    pools.machine.nodes = lambda: (FRUGAL, tiny_card())  # type: ignore[method-assign]

    fault = not_moved(pools, job, "here", to="gpu")

    assert fault.given == "6 GiB a GPU, one process, fp32; as it was estimated for a CPU"
    assert fault.allowed == "at most 3.68 GiB a GPU: the largest GPU has 4 GiB"


def test_a_job_that_is_moved_there_and_back_still_has_its_estimate(pools: JobHarness) -> None:
    job = pools.submit(gpus=1, estimate=estimated(way(6)))

    pools.jobs.move(job.id, to="cpu")

    assert pools.jobs.move(job.id, to="gpu").job.spec == job.spec


def test_a_retry_on_machines_that_have_shrunk_is_refused(harness: JobHarness) -> None:
    job = harness.submit(gpus=1, estimate=estimated(way(60)))
    harness.jobs.cancel(job.id)
    harness.machine.node = tiny_card()

    with pytest.raises(InvalidInput, match="does not fit in the memory of any machine here") as refusal:
        harness.jobs.retry(job.id)

    assert refusal.value.faults[0].allowed == "at most 3.68 GiB a GPU: the largest GPU has 4 GiB"
    assert harness.jobs.show(job.id).state is JobState.CANCELLED
    harness.machine.node = TWO_CARDS
    assert harness.jobs.retry(job.id).state is JobState.QUEUED


@pytest.mark.slow
def test_a_retry_that_no_machine_could_run_any_more_is_refused(harness: JobHarness) -> None:
    job = harness.submit(gpus=2)
    harness.jobs.cancel(job.id)
    harness.machine.node = NODE

    with pytest.raises(InvalidInput, match="no machine here can ever run this job"):
        harness.jobs.retry(job.id)

    assert harness.jobs.show(job.id).state is JobState.CANCELLED


def not_moved(harness: JobHarness, job: Job, place: str, **move: Any) -> Any:
    before = harness.jobs.show(job.id)
    with pytest.raises(FalajError, match=f"does not fit in the memory of any machine {place}") as refusal:
        harness.jobs.move(job.id, **move)
    assert harness.jobs.show(job.id) == before
    (fault,) = refusal.value.faults
    return fault


def tiny_card() -> Any:
    return NODE.model_copy(update={"gpus": (Gpu(id="GPU-7", model="T4", memory_bytes=4 * GIB),)})


def on_cpu(*ways: TrainingPlan) -> JobMemoryEstimate:
    return estimated(*ways).model_copy(update={"device": "cpu"})


def test_processes_of_all_nodes_count_and_each_node_has_its_own(harness: JobHarness) -> None:
    ways = way(120, processes=4, layout="ddp 4"), way(60, processes=8, layout="fsdp 8", as_asked=False)
    harness.machine.nodes = lambda: (TWO_CARDS, FRUGAL)  # type: ignore[method-assign]
    asked: dict[str, Any] = {"framework": "torch", "nodes": 4, "processes": 1, "gpus": 1}

    fault = refused(harness, **asked, estimate=estimated(*ways))
    assert fault.fix is not None
    assert fault.fix.startswith(
        "a smaller model or batch"
    )  # 8 processes on 4 nodes need 4 cards of one machine

    roomy = TWO_CARDS.model_copy(update={"gpus": (*TWO_CARDS.gpus, *renamed(TWO_CARDS.gpus))})
    harness.machine.nodes = lambda: (roomy, FRUGAL)  # type: ignore[method-assign]
    fault = refused(harness, **asked, estimate=estimated(*ways))
    assert fault.fix == "fsdp 8, fp32 takes 60 GiB a GPU: --processes 2 --gpus 2"


def test_nodes_that_share_a_machine_share_its_memory(light_harness: JobHarness) -> None:
    estimate = estimated(way(3, processes=4, layout="ddp 4")).model_copy(update={"device": "cpu"})

    fault = refused(light_harness, framework="torch", nodes=2, processes=2, estimate=estimate)

    assert fault.allowed == "at most 1.84 GiB a process: the largest machine here has 8 GiB for 4 processes"


def renamed(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    return tuple(gpu.model_copy(update={"id": f"{gpu.id}-again"}) for gpu in gpus)


def estimated(*ways: TrainingPlan) -> JobMemoryEstimate:
    sizes = dict.fromkeys(("parameters", "gradients", "state", "activations"), GIB)
    amounts: dict[str, Any] = {f"{name}_bytes": size for name, size in sizes.items()}
    return JobMemoryEstimate(device="cuda", batch_size=32, method="traced", ways=ways, **amounts)


def way(gib: int, **fields: Any) -> TrainingPlan:
    plain: dict[str, Any] = {"processes": 1, "layout": "one process", "precision": "fp32", "micro_batches": 1}
    return TrainingPlan(**plain | {"as_asked": True, "peak_bytes": gib * GIB} | fields)


def refused(harness: JobHarness, **spec: Any) -> Any:
    with pytest.raises(InvalidInput, match="does not fit in the memory of any machine here") as refusal:
        harness.submit(**spec)
    (fault,) = refusal.value.faults
    return fault
