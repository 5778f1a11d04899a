"""Which way the samples of a run are read: by a rule of thumb, where no search has measured it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from falaj.training.runtime.batches import BatchPlan
from falaj.training.runtime.data import Columns, Items
from falaj.training.runtime.feeding.feeders import Beside, Feeder, Inline
from falaj.training.runtime.feeding.staging import CudaRoad, Staged
from falaj.training.runtime.feeding.starting import cores_of_a_rank, way_to_start
from falaj.training.runtime.feeding.workers import Workers
from falaj.training.runtime.micro_batches import Reader
from falaj.training.runtime.plan.plans import Plan

PREFETCH = 2
LEAST_STEPS = 20
LEAST_S = 2.0
CHEAP_S = 0.002
"""Runs with fewer steps, or less reading in all, or a step that is read as fast as this: without workers."""
SHARE_OF_A_WORKER_S = 0.01
WORKERS_AT_MOST = 8
"""A worker for each so many seconds that a step takes to be read, and no more than these."""


def make_feeder(
    reader: Reader,
    batches: BatchPlan,
    plan: Plan,
    device: torch.device,
    *,
    last: int,
    say: Callable[[str], None],
) -> tuple[Feeder, Plan]:
    """The feeder for steps up to `last`, and `plan` with the number of workers that there are."""
    source = reader.source
    feeder: Feeder = Inline(reader)
    if isinstance(source, Items):
        feeder, count = for_items(reader, source, batches, plan, last=last, say=say)
        plan = replace(plan, workers=count)
    elif isinstance(source, Columns) and source.mapped:
        feeder = Beside(reader, batches, last=last, ahead=plan.prefetch or PREFETCH)
    elif plan.workers is not None or plan.prefetch is not None:  # there is nothing for them to do
        plan = replace(plan, workers=None, prefetch=None)
    is_there = isinstance(source, Columns) and source.device.type == "cuda"
    if device.type == "cuda" and not is_there and plan.pinned is not False:
        feeder = Staged(feeder, reader, batches, CudaRoad(device), last=last)
    return feeder, plan


def for_items(
    reader: Reader, items: Items, batches: BatchPlan, plan: Plan, *, last: int, say: Callable[[str], None]
) -> tuple[Feeder, int]:
    count = workers_by_thumb(reader, batches, last=last) if plan.workers is None else plan.workers
    if not count:
        return Inline(reader), 0
    way = way_to_start(items)
    if way.method is None:
        say(f"samples are read without worker processes: {way.why}")
        return Inline(reader), 0
    prefetch = plan.prefetch or PREFETCH
    if plan.workers is None:
        say(f"{count} worker processes read the samples, each {prefetch} steps ahead")
    workers = Workers(reader, items, batches, last=last, count=count, prefetch=prefetch, way=way)
    return workers, count


def workers_by_thumb(reader: Reader, batches: BatchPlan, *, last: int) -> int:
    """How many workers may pay, by what it takes to read the samples of a step here."""
    if last < LEAST_STEPS:
        return 0
    step_s = reading_seconds(reader, batches)
    if step_s < CHEAP_S or step_s * last < LEAST_S:
        return 0
    return min(WORKERS_AT_MOST, cores_of_a_rank(), math.ceil(step_s / SHARE_OF_A_WORKER_S))


def reading_seconds(reader: Reader, batches: BatchPlan) -> float:
    """How long it takes to read this process's part of the first step; the second time, if the first was short."""
    took = math.inf
    try:
        for _ in range(2):
            began = time.perf_counter()
            reader.read(1, batches.indices(1))
            took = min(took, time.perf_counter() - began)
            if took > LEAST_S:
                break
    except Exception:  # the first step will say what is wrong, and where
        return 0.0
    return took
