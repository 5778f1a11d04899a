"""Follows the stages of a pipeline on fake tensors: all of them here, one after the other, each with its own memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from falaj.training.runtime.data.sources import Batch
from falaj.training.runtime.memory.blocks import block_bytes
from falaj.training.runtime.memory.fakes import Fakes, fake_batch, fake_step
from falaj.training.runtime.memory.stages import Stage, Staged
from falaj.training.runtime.memory.tally import Tally, tensors_in
from falaj.training.runtime.memory.tracing import casting, quiet
from falaj.training.runtime.plan.plans import Plan
from falaj.training.runtime.spread.pipeline.cutting import Stages, find_stages
from falaj.training.runtime.spread.pipeline.packing import assemble, describe, room_for
from falaj.training.runtime.spread.pipeline.stage import Runner, homes_of, named_tensors
from falaj.training.runtime.step.step import Loss

CPU = torch.device("cpu")  # where fakes pretend to be


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
) -> Staged:
    """What each of `count` stages takes for micro-batches of `samples` samples, each like the one in `sample`.

    `cut_layers` are those that tensor parallelism cuts. InvalidTraining where the model cannot be cut like this; the
    model itself is not touched: its program is read from a fake, whose forward may do what it likes.
    """
    gpu = device == "cuda"
    with quiet():
        fakes = fake_step(model, loss, "sgd", sample, size=samples, fused=False, foreach=False)
        tally = Tally(gpu=gpu, copies=gpu and plan.layout != "channels_last")
        with fakes.mode:
            stages = find_stages(fakes.model, count=count, cuts=cuts)
            with tally:
                walk = _Walk(fakes, tally, stages, sample, samples=samples, plan=plan, gpu=gpu)
                found = walk.through(_cut_tensors(fakes.model, cut_layers))
    return Staged(samples=samples, stages=tuple(found), on_host=not gpu)


class _Passed(NamedTuple):
    """A stage after its forward pass: what came, what left it, and what that took."""

    batch: Batch
    arrived: list[Tensor]
    sent: list[Tensor]
    messages: list[Tensor]
    loss: Tensor | None
    kept: int
    peak: int


class _Walk:
    """One micro-batch on its way through all stages and back."""

    def __init__(
        self,
        fakes: Fakes,
        tally: Tally,
        stages: Stages,
        sample: Batch,
        *,
        samples: int,
        plan: Plan,
        gpu: bool,
    ) -> None:
        self._fakes, self._tally, self._stages = fakes, tally, stages
        self._sample, self._samples, self._plan, self._gpu = sample, samples, plan, gpu

    def through(self, cut: set[int]) -> list[Stage]:
        for tensor in [*self._fakes.model.parameters(), *self._fakes.model.buffers()]:
            self._tally.hold(tensor)
        passed: list[_Passed] = []
        left: list[Any] = []
        for number in range(len(self._stages.places)):
            each, left = self._forward(number, left)
            passed.append(each)
        homes = homes_of(self._fakes.model, self._stages)
        return [self._back(number, passed, homes, cut) for number in reversed(range(len(passed)))][::-1]

    def _forward(self, number: int, before: list[Any]) -> tuple[_Passed, list[Any]]:
        """As PipelinedStep does it; in place of the line, what arrives has memory of its own."""
        tally, start = self._tally, self._tally.now
        tally.restart()
        batch = fake_batch(self._sample, self._samples)
        inputs, target = (batch[:-1], batch[-1]) if isinstance(batch, tuple) else ((batch,), batch)
        described = describe(before, [])
        arrived = room_for(described, CPU) if number else []
        values = assemble(described, iter(arrived), CPU) if number else []
        last = number == len(self._stages.places) - 1
        with casting(self._plan.precision, gpu=self._gpu):
            left = Runner(self._fakes.model, self._stages, number)(inputs, values)
            loss = self._fakes.loss(left, target) if last else None
        leaving: list[Any] = [] if last else list(left)
        tensors: list[Tensor] = []
        describe(leaving, tensors)
        sent = [tensor for tensor in tensors if tensor.requires_grad]
        messages = [tensor.detach().contiguous() for tensor in tensors]
        del left, values, tensors
        seen = _Passed(batch, arrived, sent, messages, loss, tally.now - start, tally.peak - start)
        return seen, leaving

    def _back(self, number: int, passed: list[_Passed], homes: Mapping[str, int], cut: set[int]) -> Stage:
        each, tally = passed.pop(), self._tally
        start = tally.now
        tally.restart()
        if each.loss is not None:
            each.loss.backward()  # type: ignore[no-untyped-call]
        elif each.sent:
            torch.autograd.backward(each.sent, [torch.empty_like(tensor) for tensor in each.sent])
        own = {id(t): t for name, t in named_tensors(self._fakes.model) if homes[name] == number}
        parameters = [p for p in self._fakes.model.parameters() if id(p) in own]
        trained = [p for p in parameters if p.requires_grad]
        early = tally.held((p.grad for p in trained if p.grad is not None), at_peak=True)
        largest, outside = block_bytes(self._fakes.model, held={id(p) for p in parameters})
        return Stage(
            parameters=tally.held(iter(parameters)),
            trained=tally.held(iter(trained)),
            buffers=tally.held(b for b in self._fakes.model.buffers() if id(b) in own),
            cut=sum(p.nbytes for p in parameters if id(p) in cut),
            largest_block=largest,
            outside_blocks=outside,
            batch=tally.held(tensors_in(each.batch)),
            kept=each.kept,
            activations=max(each.peak, each.kept + tally.peak - start - early),
            early_gradients=early,
            returned=sum(t.nbytes for t in each.arrived if t.requires_grad),
        )


def _cut_tensors(model: nn.Module, layers: Sequence[str]) -> set[int]:
    return {id(p) for name in layers for p in model.get_submodule(name).parameters()}
