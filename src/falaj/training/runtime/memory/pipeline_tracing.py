"""Traces the stages of a pipeline on fake tensors, one after the other in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from falaj.training.runtime.data.sources import Batch
from falaj.training.runtime.memory.allocations import AllocationTracker, tensors_in
from falaj.training.runtime.memory.fake_tensors import FakeStep, fake_batch, make_fake_step
from falaj.training.runtime.memory.step_memory import PipelineMemory, StageMemory
from falaj.training.runtime.memory.tracing import device_autocast, without_side_effects
from falaj.training.runtime.parallel.fsdp_blocks import block_bytes
from falaj.training.runtime.parallel.pipeline.partition import Partition, partition_model
from falaj.training.runtime.parallel.pipeline.serialization import assemble, describe, empty_tensors
from falaj.training.runtime.parallel.pipeline.stage import StageRunner, named_tensors, stage_of_tensors
from falaj.training.runtime.planning.plan import Plan
from falaj.training.runtime.step.calling import BatchCall, Loss

CPU = torch.device("cpu")  # the device of fake tensors


def trace_stages(
    model: nn.Module,
    loss: Loss,
    sample: Batch,
    *,
    count: int,
    cuts: Sequence[str] | None,
    cut_layers: Sequence[str],
    samples: int,
    plan: Plan,
    device: str,
) -> PipelineMemory:
    """Return the memory of each of `count` stages for micro-batches of `samples` samples like the one in `sample`.

    `cut_layers` are those that tensor parallelism splits. Raise InvalidTraining if the model cannot be
    partitioned like this. The model itself is not touched: its graph is traced on a fake copy.
    """
    gpu = device == "cuda"
    with without_side_effects():
        fakes = make_fake_step(model, loss, "sgd", sample, size=samples, fused=False, foreach=False)
        tracker = AllocationTracker(gpu=gpu, copies=gpu and plan.layout != "channels_last")
        with fakes.mode:
            stages = partition_model(fakes.model, count=count, cuts=cuts)
            with tracker:
                walk = _PipelineTracer(fakes, tracker, stages, sample, samples=samples, plan=plan, gpu=gpu)
                found = walk.through(_cut_tensors(fakes.model, cut_layers))
    return PipelineMemory(samples=samples, stages=tuple(found), on_host=not gpu)


class _ForwardPass(NamedTuple):
    """A stage after its forward pass: its inputs, its outputs, and the memory that the pass took."""

    batch: Batch
    received: list[Tensor]
    sent: list[Tensor]
    messages: list[Tensor]
    loss: Tensor | None
    kept: int
    peak: int


class _PipelineTracer:
    """Runs one micro-batch forward and backward through all stages."""

    def __init__(
        self,
        fakes: FakeStep,
        tracker: AllocationTracker,
        stages: Partition,
        sample: Batch,
        *,
        samples: int,
        plan: Plan,
        gpu: bool,
    ) -> None:
        self._fakes, self._tracker, self._stages = fakes, tracker, stages
        self._sample, self._samples, self._plan, self._gpu = sample, samples, plan, gpu

    def through(self, cut: set[int]) -> list[StageMemory]:
        for tensor in [*self._fakes.model.parameters(), *self._fakes.model.buffers()]:
            self._tracker.track(tensor)
        passed: list[_ForwardPass] = []
        left: list[Any] = []
        for number in range(len(self._stages.places)):
            each, left = self._forward(number, left)
            passed.append(each)
        stage_of = stage_of_tensors(self._fakes.model, self._stages)
        return [self._back(number, passed, stage_of, cut) for number in reversed(range(len(passed)))][::-1]

    def _forward(self, number: int, before: list[Any]) -> tuple[_ForwardPass, list[Any]]:
        """Run a stage as PipelinedStep does; received activations get memory of their own."""
        tracker, start = self._tracker, self._tracker.current
        tracker.reset_peak()
        batch = fake_batch(self._sample, self._samples)
        call = BatchCall(self._fakes.model, self._fakes.loss)
        inputs, target = call.split(batch)
        described = describe(before, [])
        received = empty_tensors(described, CPU) if number else []
        values = assemble(described, iter(received), CPU) if number else []
        last = number == len(self._stages.places) - 1
        with device_autocast(self._plan.precision, gpu=self._gpu):
            left = StageRunner(self._fakes.model, self._stages, number)(inputs, values)
            loss = call.loss_of(left, target) if last else None
        leaving: list[Any] = [] if last else list(left)
        tensors: list[Tensor] = []
        describe(leaving, tensors)
        sent = [tensor for tensor in tensors if tensor.requires_grad]
        messages = [tensor.detach().contiguous() for tensor in tensors]
        del left, values, tensors
        seen = _ForwardPass(
            batch, received, sent, messages, loss, tracker.current - start, tracker.peak - start
        )
        return seen, leaving

    def _back(
        self, number: int, passed: list[_ForwardPass], stage_of: Mapping[str, int], cut: set[int]
    ) -> StageMemory:
        each, tracker = passed.pop(), self._tracker
        start = tracker.current
        tracker.reset_peak()
        if each.loss is not None:
            each.loss.backward()  # type: ignore[no-untyped-call]
        elif each.sent:
            torch.autograd.backward(each.sent, [torch.empty_like(tensor) for tensor in each.sent])
        own = {id(t): t for name, t in named_tensors(self._fakes.model) if stage_of[name] == number}
        parameters = [p for p in self._fakes.model.parameters() if id(p) in own]
        trained = [p for p in parameters if p.requires_grad]
        early = tracker.bytes_of((p.grad for p in trained if p.grad is not None), at_peak=True)
        largest, outside = block_bytes(self._fakes.model, held={id(p) for p in parameters})
        return StageMemory(
            parameters=tracker.bytes_of(iter(parameters)),
            trained=tracker.bytes_of(iter(trained)),
            buffers=tracker.bytes_of(b for b in self._fakes.model.buffers() if id(b) in own),
            cut=sum(p.nbytes for p in parameters if id(p) in cut),
            largest_block=largest,
            outside_blocks=outside,
            batch=tracker.bytes_of(tensors_in(each.batch)),
            kept=each.kept,
            activations=max(each.peak, each.kept + tracker.peak - start - early),
            early_gradients=early,
            returned=sum(t.nbytes for t in each.received if t.requires_grad),
        )


def _cut_tensors(model: nn.Module, layers: Sequence[str]) -> set[int]:
    return {id(p) for name in layers for p in model.get_submodule(name).parameters()}
