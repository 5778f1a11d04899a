"""The choice of a loader for a run: by a heuristic where no search has measured it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.data.dataloading.device_prefetch import CudaTransfer, DevicePrefetcher
from falaj.training.runtime.data.dataloading.loaders import BatchLoader, InlineLoader, ThreadLoader
from falaj.training.runtime.data.dataloading.start_method import choose_start_method, cores_per_rank
from falaj.training.runtime.data.dataloading.worker_pool import WorkerPoolLoader
from falaj.training.runtime.data.sources import DatasetSource, TensorSource
from falaj.training.runtime.planning.plan import Plan
from falaj.training.runtime.step.micro_batches import MicroBatchReader

DEFAULT_PREFETCH = 2
MIN_STEPS = 20
MIN_READ_S = 2.0
CHEAP_READ_S = 0.002
"""Runs with fewer steps, less reading in total, or cheaper steps than this use no workers."""
READ_S_PER_WORKER = 0.01
MAX_WORKERS = 8
"""One worker per this many seconds of reading per step, up to the maximum."""


def make_loader(
    reader: MicroBatchReader,
    batches: BatchPlan,
    plan: Plan,
    device: torch.device,
    *,
    last: int,
    notify: Callable[[str], None],
) -> tuple[BatchLoader, Plan]:
    """Return the loader for steps up to `last`, and `plan` with the actual number of workers."""
    source = reader.source
    loader: BatchLoader = InlineLoader(reader)
    if isinstance(source, DatasetSource):
        loader, count = make_dataset_loader(reader, source, batches, plan, last=last, notify=notify)
        plan = replace(plan, workers=count)
    elif isinstance(source, TensorSource) and source.mapped:
        loader = ThreadLoader(reader, batches, last=last, ahead=plan.prefetch or DEFAULT_PREFETCH)
    elif plan.workers is not None or plan.prefetch is not None:  # tensors need no workers
        plan = replace(plan, workers=None, prefetch=None)
    is_there = isinstance(source, TensorSource) and source.device.type == "cuda"
    if device.type == "cuda" and not is_there and plan.pinned is not False:
        loader = DevicePrefetcher(loader, reader, batches, CudaTransfer(device), last=last)
    return loader, plan


def make_dataset_loader(
    reader: MicroBatchReader,
    items: DatasetSource,
    batches: BatchPlan,
    plan: Plan,
    *,
    last: int,
    notify: Callable[[str], None],
) -> tuple[BatchLoader, int]:
    count = estimate_worker_count(reader, batches, last=last) if plan.workers is None else plan.workers
    if not count:
        return InlineLoader(reader), 0
    start_method = choose_start_method(items)
    if start_method.method is None:
        notify(f"samples are read without worker processes: {start_method.why}")
        return InlineLoader(reader), 0
    prefetch = plan.prefetch or DEFAULT_PREFETCH
    if plan.workers is None:
        notify(f"{count} worker processes read the samples, each {prefetch} steps ahead")
    workers = WorkerPoolLoader(
        reader, items, batches, last=last, count=count, prefetch=prefetch, start_method=start_method
    )
    return workers, count


def estimate_worker_count(reader: MicroBatchReader, batches: BatchPlan, *, last: int) -> int:
    """Return the number of workers that may pay off, by the time to read a step in this process."""
    if last < MIN_STEPS:
        return 0
    step_s = measure_read_s(reader, batches)
    if step_s < CHEAP_READ_S or step_s * last < MIN_READ_S:
        return 0
    return min(MAX_WORKERS, cores_per_rank(), math.ceil(step_s / READ_S_PER_WORKER))


def measure_read_s(reader: MicroBatchReader, batches: BatchPlan) -> float:
    """Return the time to read this process's part of the first step; the faster of two reads if they are short."""
    took = math.inf
    try:
        for _ in range(2):
            began = time.perf_counter()
            reader.read(1, batches.indices(1))
            took = min(took, time.perf_counter() - began)
            if took > MIN_READ_S:
                break
    except Exception:  # the first step will raise it with its place
        return 0.0
    return took
