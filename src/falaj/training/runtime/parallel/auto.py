"""parallel="auto": chooses the parallel layout by the memory that each one would take.

Replicas (ddp) if they fit, because they communicate the least; otherwise fsdp, fsdp with tensor parallelism,
and then all of these with more micro-batches; last, if the model can be cut into stages, a pipeline and its
combinations. The leading process decides by the smallest memory of any process, and states the reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from falaj.training.runtime.data.sources import SampleSource, TensorSource
from falaj.training.runtime.errors import InvalidTraining, NoEstimate, TrainingFault
from falaj.training.runtime.memory.configurations import automatic_layouts
from falaj.training.runtime.memory.estimator import MemoryEstimator
from falaj.training.runtime.memory.sizes import available_memory, format_bytes
from falaj.training.runtime.options import INITIAL_BATCH_SIZE, FitOptions
from falaj.training.runtime.parallel.layout import ParallelLayout, parallel_layout
from falaj.training.runtime.parallel.process_group import ProcessGroup
from falaj.training.runtime.planning.plan import Plan
from falaj.training.runtime.step.calling import Loss
from falaj.training.runtime.step.cuda_graph import list_tensors

SMALL_SHARE = 0.05
"""If an upper bound of the model's memory is at most this share of the memory, no estimate is made."""
RESIDENT_SHARE = 0.25
"""Data that takes at most this share of a GPU is kept there during training."""


def resolve_layout(
    model: nn.Module,
    loss: Loss,
    source: SampleSource,
    options: FitOptions,
    plan: Plan,
    world: ProcessGroup,
    notify: Callable[[str], None],
) -> tuple[FitOptions, Plan]:
    """Return settings and plan with the layout and the micro-batches that `auto` resolves to."""
    parallelism = options.parallelism
    if world.size == 1 or parallelism.exact or parallelism.parallel != "auto":
        return options, plan
    memory = least_memory(parallelism.memory or available_memory(world.device), world)
    decided: dict[str, Any] = {}
    if world.is_leader:
        decided = decide(model, loss, source, options, plan, world, memory)
    shared = world.broadcast_bytes(bytearray(json.dumps(decided).encode()) if world.is_leader else None)
    decided = json.loads(bytes(shared or b"{}"))
    if "fault" in decided:
        raise InvalidTraining(
            "this model does not fit into the available memory", faults=[TrainingFault(**decided["fault"])]
        )
    if world.is_leader and decided["reason"]:
        notify(decided["reason"])
    resolved = replace(parallelism, parallel=decided["parallel"])
    return replace(options, parallelism=resolved), replace(plan, micro_batches=decided["micro_batches"])


def decide(
    model: nn.Module,
    loss: Loss,
    source: SampleSource,
    options: FitOptions,
    plan: Plan,
    world: ProcessGroup,
    memory: int,
) -> dict[str, Any]:
    """Return the decision of the leading process: a layout with micro-batches and a reason, or a fault."""
    given = options.batching.batch_size
    size = plan.batch_size or (INITIAL_BATCH_SIZE if given == "auto" else given)
    copies = parallel_layout("ddp", world.size)
    try:
        if rough_bytes(model, source, -(-size // world.size)) <= SMALL_SHARE * memory:
            return _decision(copies, plan.micro_batches, "")
        estimator = MemoryEstimator(
            *(model, loss, source, options.optimization.optimizer, plan, size),
            device=world.device.type,
            tensor_plan=options.parallelism.tensor_plan,
            pipeline_cuts=options.parallelism.pipeline_cuts,
            fixed_micro_batches=options.compute.accumulate is not None,
        )
        return choose(estimator, world.size, memory - resident_bytes(source, world, memory))
    except NoEstimate as failure:
        return _decision(copies, plan.micro_batches, f"parallel: {copies.summary}; {failure.message}")
    except Exception as failure:  # the other processes wait for a decision
        reason = str(failure).strip().split("\n")[0]
        return _decision(copies, plan.micro_batches, f"parallel: {copies.summary}; no estimate ({reason})")


def choose(estimator: MemoryEstimator, processes: int, memory: int) -> dict[str, Any]:
    """Return the first layout that fits; with the requested number of micro-batches, if there is one."""
    first: str | None = None
    for layout, count in automatic_layouts(estimator, processes):
        usual = estimator.default_micro_batches(layout)
        if count != usual and not estimator.may_split_batches("auto", processes):
            continue
        peak = estimator.peak(layout, count)
        name = layout.summary + (f" in {count} micro-batches" if count != usual else "")
        first = first or f"; {name} would need {format_bytes(peak)}"
        if peak <= memory:
            why = "" if name == parallel_layout("ddp", processes).summary else first
            taken = f"parallel: {name}, {format_bytes(peak)} a process of {format_bytes(memory)}{why}"
            return _decision(layout, count, taken)
    return {"fault": no_fit_fault(estimator, processes, memory)}


def no_fit_fault(estimator: MemoryEstimator, processes: int, memory: int) -> dict[str, Any]:
    """Return a fault with the required memory and the closest configuration that fits."""
    found = estimator.estimate("auto", processes)
    least = min((way for way in found.ways if way.as_asked), key=lambda way: way.peak_bytes)
    nearest = next(found.fitting(memory), None)
    return {
        "where": f"memory of {processes} processes",
        "given": f"{found.ways[0].summary}; at the least {least.summary}",
        "allowed": f"{format_bytes(memory)} a process",
        "fix": f"{nearest.processes} processes: {nearest.summary}" if nearest else "a smaller model or batch",
    }


def least_memory(own: int, world: ProcessGroup) -> int:
    """Return the smallest memory of any process."""
    found = torch.tensor([own], dtype=torch.int64, device=world.device)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found.item())


def rough_bytes(model: nn.Module, source: SampleSource, samples: int) -> float:
    """Return a generous upper bound of the training memory, without tracing the model.

    Parameters, gradients, their copies, two for optimizer state and one for the update make six. At each
    position of a sample each layer keeps eight numbers per input and output, and sixteen per pair of positions
    in a sequence.
    """
    every = list(model.parameters())
    widths = sum(sum(p.shape[:2]) for p in every)
    sample = list_tensors(source.read(torch.zeros(1, dtype=torch.int64), seed=0))
    places = max(map(max_uses_per_sample, sample), default=1)
    pairs = places**2 * len(every) if any(map(is_sequence, sample)) else 0
    return 6 * sum(p.nbytes for p in every) + samples * (32 * places * widths + 64 * pairs)


def max_uses_per_sample(tensor: Tensor) -> int:
    """Return at most how often a parameter is used per sample: tokens, time steps, pixels."""
    shape = tensor.shape[1:]
    if not tensor.is_floating_point():
        return max(1, math.prod(shape))
    return max(1, math.prod(shape[1:]), max(shape) if len(shape) == 2 else 1)


def is_sequence(tensor: Tensor) -> bool:
    return tensor.dim() == (3 if tensor.is_floating_point() else 2) and tensor.shape[1] > 1


def resident_bytes(source: SampleSource, world: ProcessGroup, memory: int) -> int:
    """Return the size of the data if it is kept on a GPU, else 0."""
    if world.device.type != "cuda" or not isinstance(source, TensorSource):
        return 0
    return source.size_bytes if source.size_bytes <= RESIDENT_SHARE * memory else 0


def _decision(layout: ParallelLayout, micro_batches: int, reason: str) -> dict[str, Any]:
    parallel = {"fsdp" if layout.shards else "ddp": layout.data, "tensor": layout.tensor}
    if layout.pipeline > 1:
        parallel["pipeline"] = layout.pipeline
    return {"parallel": parallel, "micro_batches": micro_batches, "reason": reason}
