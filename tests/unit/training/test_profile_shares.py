"""The breakdown of the time of a step from events; those of GPUs are synthetic."""

from __future__ import annotations

from typing import Any

import pytest

from falaj.training.runtime.planning.plan import Plan
from falaj.training.runtime.profiling.bottleneck import BottleneckReport, RunConditions, diagnose
from falaj.training.runtime.profiling.breakdown import (
    PARTS,
    Overlap,
    difference,
    intersection,
    time_breakdown,
    union,
)
from falaj.training.runtime.profiling.cost import StepCost
from falaj.training.runtime.profiling.events import TraceEvent, events_of
from falaj.training.runtime.profiling.peaks import DevicePeaks, gpu_peaks

ALONE = RunConditions(Plan())


def gpu_step(
    *,
    data: float = 0.0,
    forward: tuple[float, float] = (1.0, 4.0),
    backward: tuple[float, float] = (2.0, 6.0),
    nccl: tuple[float, float] | None = None,
    copy: tuple[float, float] | None = None,
    end: float = 10.0,
) -> list[TraceEvent]:
    """Return events of a step of `end` seconds: data arrives at `data`; two kernels are launched at 1 and 2 seconds."""
    found = [
        TraceEvent("falaj.step", "range", 0.0, end),
        TraceEvent("falaj.data", "range", 0.0, data),
        TraceEvent("falaj.forward", "range", data, data + 0.5),
        TraceEvent("falaj.backward", "range", data + 0.5, end),
        TraceEvent("cudaLaunchKernel", "launch", data + 0.1, data + 0.2, 1),
        TraceEvent("cudaLaunchKernel", "launch", data + 0.6, data + 0.7, 2),
        TraceEvent("ampere_gemm", "kernel", *forward, 1),
        TraceEvent("ampere_gemm", "kernel", *backward, 2),
    ]
    found += [TraceEvent("ncclDevKernel_AllReduce", "communication", *nccl, 3)] if nccl else []
    return found + ([TraceEvent("Memcpy HtoD", "copy", *copy, 4)] if copy else [])


def verdict(events: list[TraceEvent], conditions: RunConditions = ALONE, **known: Any) -> BottleneckReport:
    return diagnose(time_breakdown(events), conditions, **{"cost": None, "peaks": None, **known})


def test_kernels_count_for_the_phase_that_launched_them() -> None:
    shares = time_breakdown(gpu_step(forward=(1.0, 4.0), backward=(4.0, 10.0)))

    assert shares.on_gpu
    assert shares.of["forward"] == pytest.approx(0.3)
    assert shares.of["backward"] == pytest.approx(0.6)
    assert shares.of["launch"] == pytest.approx(0.1)


def test_shares_add_up_to_one_whatever_overlaps() -> None:
    steps = gpu_step(data=0.5, nccl=(3.0, 9.0), copy=(0.2, 2.5))

    assert sum(time_breakdown(steps).of.values()) == pytest.approx(1.0)
    assert set(time_breakdown(steps).of) == set(PARTS)


def test_gpu_that_waits_for_data_is_input_bound_and_workers_are_named() -> None:
    found = verdict(gpu_step(data=6.2, forward=(6.3, 8.0), backward=(8.0, 10.0)))

    assert found.bound == "input"
    assert found.sentence.startswith("input-bound: 62% of a step waits for data; workers=4")


def test_gpu_that_waits_for_kernels_is_launch_bound() -> None:
    found = verdict(gpu_step(forward=(1.0, 2.0), backward=(5.0, 6.0)))

    assert found.bound == "launch"
    assert found.shares["launch"] == pytest.approx(0.8)
    assert 'tune="auto"' in found.sentence
    assert "tune" not in verdict(gpu_step(), RunConditions(Plan(graph=True))).sentence


def test_only_communication_without_overlap_counts_as_waiting() -> None:
    hidden = time_breakdown(gpu_step(forward=(0.0, 4.0), backward=(4.0, 10.0), nccl=(5.0, 9.0)))
    shown = time_breakdown(gpu_step(forward=(0.0, 2.0), backward=(2.0, 4.0), nccl=(3.0, 10.0)))

    assert hidden.of["communication"] == 0.0
    assert hidden.communication == Overlap(4.0, 4.0)
    assert shown.of["communication"] == pytest.approx(0.6)
    assert shown.communication == Overlap(pytest.approx(7.0), pytest.approx(1.0))


def test_exposed_communication_suggests_the_cheaper_layout() -> None:
    events = gpu_step(forward=(0.0, 2.0), backward=(2.0, 4.0), nccl=(3.0, 10.0))

    found = verdict(events, RunConditions(Plan(micro_batches=2), processes=4, layout="fsdp 4"))

    assert found.bound == "communication"
    assert "60% of a step waits for other processes" in found.sentence
    assert any('parallel="ddp"' in each for each in found.advice)


def test_copies_beside_kernels_cost_nothing_and_others_are_input() -> None:
    found = verdict(gpu_step(forward=(5.0, 7.0), backward=(7.0, 10.0), copy=(0.0, 6.0)))

    assert found.bound == "input"
    assert "50% of a step waits for copies" in found.sentence
    assert found.overlap["copies"] == Overlap(6.0, 1.0)


def test_busy_gpu_is_bound_by_the_nearer_roofline() -> None:
    busy = gpu_step(forward=(0.0, 5.0), backward=(5.0, 10.0))
    peaks = DevicePeaks(flops=100.0, bandwidth=100.0)

    computing = verdict(busy, cost=StepCost(flops=900.0, bytes=100.0), peaks=peaks)
    moving = verdict(busy, cost=StepCost(flops=100.0, bytes=900.0), peaks=peaks)

    assert computing.bound == "compute"
    assert "at 90% of the peak FLOP/s" in computing.sentence
    assert moving.bound == "memory"
    assert "compile=True" in moving.sentence
    assert any("bf16" in each for each in moving.advice)


def test_kernels_of_a_replayed_graph_count_as_compute() -> None:
    events = [
        TraceEvent("falaj.step", "range", 0.0, 10.0),
        TraceEvent("cudaGraphLaunch", "launch", 0.1, 0.2, 1),
        TraceEvent("gemm", "kernel", 0.5, 9.5, 1),
    ]

    found = time_breakdown(events)

    assert found.of["compute"] == pytest.approx(0.9)
    assert found.of["python"] == pytest.approx(0.1)


def test_checkpoints_and_evaluations_between_steps_are_left_out() -> None:
    events = [
        TraceEvent("falaj.step", "range", 0.0, 10.0),
        TraceEvent("falaj.forward", "range", 0.0, 4.0),
        TraceEvent("aten::mm", "operation", 0.0, 4.0),
        TraceEvent("falaj.aside", "range", 5.0, 10.0),
    ]

    found = time_breakdown(events)

    assert found.step_s == pytest.approx(5.0)
    assert found.of["forward"] == pytest.approx(0.8)


def test_on_a_cpu_the_gap_between_operations_is_launching_and_gloo_is_communication() -> None:
    events = [
        TraceEvent("falaj.step", "range", 0.0, 10.0),
        TraceEvent("falaj.backward", "range", 0.0, 9.0),
        TraceEvent("autograd::mm", "operation", 0.0, 3.0),
        TraceEvent("c10d::allreduce_", "operation", 3.0, 3.5),
        TraceEvent("gloo:all_reduce", "communication", 2.0, 8.0),
    ]

    found = time_breakdown(events)

    assert found.of == {part: pytest.approx(found.of[part]) for part in PARTS}
    assert found.of["backward"] == pytest.approx(0.3)
    assert found.of["communication"] == pytest.approx(0.5)
    assert found.of["launch"] == pytest.approx(0.1)
    assert found.of["python"] == pytest.approx(0.1)
    assert found.communication.hidden == pytest.approx(1.0)


def test_rows_of_a_trace_become_events() -> None:
    rows: list[dict[str, Any]] = [
        {"ph": "X", "cat": "user_annotation", "name": "falaj.step", "ts": 1e6, "dur": 2e6},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "falaj.step", "ts": 1e6, "dur": 2e6},
        {"ph": "X", "cat": "user_annotation", "name": "nccl:all_reduce", "ts": 1e6, "dur": 2e6},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1e6, "dur": 1e6, "args": {"correlation": 7}},
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum", "ts": 1e6, "dur": 1e6},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "ts": 1e6, "dur": 1e6},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "ts": 1e6, "dur": 1e6},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 1e6, "dur": 1e6},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1e6, "args": {"correlation": 7}},
        {"ph": "M", "name": "process_name"},
    ]

    found = list(events_of(rows))

    assert [event.kind for event in found] == [
        *("range", "kernel", "communication", "copy", "kernel", "launch"),
    ]
    assert found[0] == TraceEvent("falaj.step", "range", 1.0, 3.0)
    assert found[1].correlation == found[-1].correlation == 7


def test_events_without_a_step_are_reported() -> None:
    with pytest.raises(ValueError, match="no step"):
        time_breakdown([TraceEvent("gemm", "kernel", 0.0, 1.0)])


def test_interval_sets() -> None:
    one, other = union([(5, 7), (0, 2), (1, 3)]), union([(2, 6)])

    assert one == [(0, 3), (5, 7)]
    assert intersection(one, other) == [(2, 3), (5, 6)]
    assert difference(one, other) == [(0, 2), (6, 7)]


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("Tesla T4", 65),
        ("NVIDIA GeForce RTX 4090", 165),
    ],
)
def test_gpus_are_found_by_driver_name(name: str, tera: float) -> None:
    found = gpu_peaks(name, "bf16")

    assert found is not None
    assert found.flops == tera * 1e12


def test_unknown_gpu_has_no_peaks_in_the_table() -> None:
    assert gpu_peaks("NVIDIA L400 Something", "bf16") is None
