"""Traces the memory of a step on a few real samples, for models that cannot run on fake tensors.

Only the forward and backward pass are computed, with the model's own parameters and copies of its buffers, so
no argument is changed. Gradients, optimizer state and update are derived from the parameters' shapes. With few
samples gradients dominate: the peak of the activations is measured without them, as it would be with many
samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from falaj.training.runtime.data.sources import Batch
from falaj.training.runtime.memory.allocations import AllocationTracker, tensors_in
from falaj.training.runtime.memory.step_memory import StepTrace
from falaj.training.runtime.memory.tracing import (
    compute_loss,
    device_autocast,
    state_tensors,
    without_side_effects,
    workspace_bytes,
)
from falaj.training.runtime.planning.plan import Plan
from falaj.training.runtime.step.calling import Loss
from falaj.training.runtime.step.modes import ensure_training_mode, preserved_modes
from falaj.training.runtime.step.optimizers import OptimizerChoice, make_optimizer


def trace_samples(
    model: nn.Module,
    loss: Loss,
    optimizer: OptimizerChoice,
    batch: Batch,
    *,
    samples: int,
    plan: Plan,
    device: str,
) -> StepTrace:
    """Return the memory of a step over the samples in `batch`, computed on the model's device."""
    gpu = device == "cuda"
    tracker = AllocationTracker(gpu=gpu, copies=gpu and plan.layout != "channels_last", exact_sizes=True)
    own = {name: p.detach().requires_grad_(p.requires_grad) for name, p in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    trained = [p for p in own.values() if p.requires_grad]

    def run(*inputs: Any, **named: Any) -> Any:
        return functional_call(model, {**own, **buffers}, inputs, named)

    with preserved_modes(model), without_side_effects(), tracker:
        ensure_training_mode(model)
        for tensor in [*own.values(), *buffers.values(), *tensors_in(batch)]:
            tracker.track(tensor)
        with device_autocast(plan.precision, gpu=gpu):
            value = compute_loss(model, run, loss, batch)
        gradients = torch.autograd.grad(value, trained, allow_unused=True)
    state, update = optimizer_bytes(optimizer, model, plan, gpu=gpu)
    activations, early = tracker.peak_without(
        tensors_in(gradients), iter([*own.values(), *buffers.values()])
    )  # including the samples
    blocks = AllocationTracker()
    size = blocks.bytes_of(iter(trained))
    return StepTrace(
        samples=samples,
        parameters=blocks.bytes_of(iter(own.values())),
        trained=size,
        buffers=blocks.bytes_of(iter(buffers.values())),
        state=2 * size if state is None else state,
        activations=activations,
        batch=tracker.bytes_of(tensors_in(batch)),
        early_gradients=early,
        update=size if update is None else update,
        workspace=workspace_bytes(True, True) if gpu else 0,
    )


def optimizer_bytes(
    choice: OptimizerChoice, model: nn.Module, plan: Plan, *, gpu: bool
) -> tuple[int | None, int | None]:
    """Return the bytes of the optimizer's state and update; None if they cannot be traced: then Adam's are
    assumed."""
    if isinstance(choice, torch.optim.Optimizer):
        return None, None
    try:
        with FakeTensorMode(), AllocationTracker() as tracker:
            shapes = [p.shape for p in model.parameters() if p.requires_grad]
            fakes = [nn.Parameter(torch.empty(shape)) for shape in shapes]
            made = make_optimizer(choice, fakes, lr=1e-3, fused=plan.fused and gpu)
            for group in made.param_groups:
                if gpu and group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True
            for fake in fakes:
                fake.grad = torch.empty_like(fake)
            made.step()
            state = tracker.bytes_of(state_tensors(made))
            tracker.reset_peak()
            settled = tracker.current
            made.step()
            return state, tracker.peak - settled
    except Exception:  # any error of a user-defined optimizer
        return None, None
