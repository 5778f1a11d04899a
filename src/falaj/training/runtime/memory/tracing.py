"""Traces the memory of a training step on fake tensors.

Two steps are traced, because the first has no optimizer state yet. Both run on fake CPU tensors; differences of
a GPU are corrected in `allocations` and `gpu_autocast`. A model that reads tensor values (for control flow or
shapes) cannot run on fake tensors: `sample_tracing` runs it on a few real samples instead.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn, optim

from falaj.training.runtime.data.sources import Batch
from falaj.training.runtime.memory.allocations import AllocationTracker, tensors_in
from falaj.training.runtime.memory.fake_tensors import FakeStep, make_fake_step
from falaj.training.runtime.memory.gpu_autocast import GpuAutocast
from falaj.training.runtime.memory.step_memory import StepTrace
from falaj.training.runtime.parallel.tensor_plan import Cut
from falaj.training.runtime.planning.plan import Plan, Precision
from falaj.training.runtime.step.calling import BatchCall, Loss
from falaj.training.runtime.step.optimizers import OptimizerChoice
from falaj.training.runtime.step.rng import preserved_rng_state

MiB = 1 << 20
WORKSPACE_BYTES = 32 * MiB
"""The cuBLAS workspace of each thread that multiplies matrices, on Hopper (8 MiB on older GPUs); forward and
backward passes run in a thread each."""
LT_WORKSPACE_BYTES = 1 * MiB
"""The additional workspace of cuBLASLt in the forward pass."""


def trace_step(
    model: nn.Module,
    loss: Loss,
    optimizer: OptimizerChoice,
    sample: Batch,
    *,
    samples: int,
    plan: Plan,
    device: str,
    halved: Mapping[str, Cut] | None = None,
) -> StepTrace:
    """Return the memory of a step over `samples` samples like the one in `sample`, on a `device`: cuda or cpu.

    Nothing is computed, and no argument is changed. Exceptions of the model on fake tensors are passed on.
    `halved` are layers whose other half is held by another process.
    """
    gpu = device == "cuda"
    with without_side_effects():
        fakes = make_fake_step(
            *(model, loss, optimizer, sample),
            size=samples,
            fused=plan.fused and gpu,
            foreach=gpu,
            halved=halved,
        )
        tracker = AllocationTracker(gpu=gpu, copies=gpu and plan.layout != "channels_last")
        with fakes.mode, tracker:
            return _trace_two_steps(fakes, tracker, samples=samples, precision=plan.precision, gpu=gpu)


def _trace_two_steps(
    fakes: FakeStep, tracker: AllocationTracker, *, samples: int, precision: Precision, gpu: bool
) -> StepTrace:
    model, optimizer = fakes.model, fakes.optimizer
    for tensor in [*model.parameters(), *model.buffers(), *tensors_in(fakes.batch)]:
        tracker.track(tensor)
    parameters, buffers = tracker.bytes_of(model.parameters()), tracker.bytes_of(model.buffers())
    trained = tracker.bytes_of(iter(fakes.trained))
    _forward_backward(fakes, tracker, precision, gpu=gpu)
    optimizer.step()
    optimizer.zero_grad()
    state = tracker.bytes_of(state_tensors(optimizer))
    tracker.reset_peak()
    multiplies = _forward_backward(fakes, tracker, precision, gpu=gpu)
    early = tracker.bytes_of((p.grad for p in fakes.trained if p.grad is not None), at_peak=True)
    activations = tracker.peak - parameters - buffers - state - early
    tracker.reset_peak()
    settled = tracker.current
    optimizer.step()
    return StepTrace(
        samples=samples,
        parameters=parameters,
        trained=trained,
        buffers=buffers,
        state=state,
        activations=max(0, activations),
        batch=tracker.bytes_of(tensors_in(fakes.batch)),
        early_gradients=early,
        update=tracker.peak - settled,
        workspace=workspace_bytes(*multiplies) if gpu else 0,
    )


def _forward_backward(
    fakes: FakeStep, tracker: AllocationTracker, precision: Precision, *, gpu: bool
) -> tuple[bool, bool]:
    """Run both passes; return whether each of them multiplies matrices."""
    tracker.multiplied = False
    with device_autocast(precision, gpu=gpu):
        value = compute_loss(fakes.model, fakes.model, fakes.loss, fakes.batch)
    forward, tracker.multiplied = tracker.multiplied, False
    value.backward()  # type: ignore[no-untyped-call]
    return forward, tracker.multiplied


def workspace_bytes(forward: bool, backward: bool) -> int:
    """Return the workspace of the matrix library for the passes that multiply matrices."""
    return forward * (WORKSPACE_BYTES + LT_WORKSPACE_BYTES) + backward * WORKSPACE_BYTES


def compute_loss(model: nn.Module, run: Callable[..., Any], loss: Loss, batch: Batch) -> Tensor:
    """Return the loss of `batch` by `run`, which calls `model`, as a training step computes it."""
    return BatchCall(model, loss)(run, batch)


def state_tensors(optimizer: optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from tensors_in(list(state.values()) if isinstance(state, dict) else state)


@contextmanager
def device_autocast(precision: Precision, *, gpu: bool) -> Iterator[None]:
    """Apply autocast as on the target device to fake or real CPU tensors."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    with ExitStack() as stack:
        cast: AbstractContextManager[Any] = nullcontext() if half is None else torch.autocast("cpu", half)
        stack.enter_context(cast)
        if half is not None and gpu:
            stack.enter_context(GpuAutocast())
        yield


@contextmanager
def without_side_effects() -> Iterator[None]:
    """Keep random generators unchanged and suppress warnings."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_silent, log.disabled = log.disabled, True  # failures on fake tensors are expected
    try:
        with preserved_rng_state(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = was_silent
