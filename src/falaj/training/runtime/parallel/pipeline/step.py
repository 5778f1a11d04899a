"""The training step of a pipeline, with the 1F1B schedule of micro-batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from falaj.training.runtime.data.sources import Batch, to_device
from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.parallel.pipeline.channel import (
    ReceivedActivations,
    Sending,
    SentActivations,
    wait_all,
)
from falaj.training.runtime.parallel.pipeline.pipelined_model import PipelinedModel
from falaj.training.runtime.planning.plan import CompileMode
from falaj.training.runtime.step.micro_batches import MicroBatch
from falaj.training.runtime.step.step import Step, invalid_loss, require_scalar


class InFlightMicroBatch(NamedTuple):
    """A micro-batch between its forward and backward pass: what was received and sent for it."""

    received: ReceivedActivations | None
    sent: SentActivations | None
    loss: Tensor | None


class PipelinedStep(Step):
    """`model` is the stage of this process. Activations go to the next stage; the last one computes the loss."""

    def __init__(self, pipeline: PipelinedModel, *args: Any, **options: Any) -> None:
        super().__init__(pipeline.part, *args, **options)
        self._pipeline, self._channel = pipeline, pipeline.channel
        self._measure: Callable[[Any], Any] = self._run_stage
        self._differentiate: Callable[[Any], object] = lambda given: torch.autograd.backward(*given)
        if self.scaler is not None:
            fault = TrainingFault(
                "precision", "fp16", "fp32, tf32 or bf16, with a pipeline", 'precision="bf16"'
            )
            raise InvalidTraining("a pipeline does not scale losses", faults=[fault])

    def compile(self, notify: Callable[[str], None], *, mode: CompileMode = "default") -> None:
        notify("torch.compile is not supported with a pipeline: continuing without it")

    def measure(self, batch: Batch) -> Tensor:
        passed = self._forward(batch, None)
        if passed.sent is not None:
            wait_all(passed.sent.messages)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        return self._pipeline.from_last(loss if passed.loss is None else passed.loss.detach().double())

    @contextmanager
    def full_model(self) -> Iterator[nn.Module]:
        with self._pipeline.full_model() as model:
            yield model

    def finish_model(self) -> None:
        self._pipeline.finish_model(torch.device("cpu"))

    def _gradients(self, step: int, parts: Sequence[MicroBatch]) -> Tensor:
        self.optimizer.zero_grad()
        in_flight: deque[InFlightMicroBatch] = deque()
        messages: list[Sending] = []
        for turn, number in schedule_1f1b(len(parts), later_stages=self._pipeline.later_stages):
            part = parts[number]
            if turn == "forward":
                batch = to_device(part.batch, self.device)
                in_flight.append(self._forward(batch, (step, part.place)))
            else:
                with self.strategy.micro_batch(last=part is parts[-1]):
                    loss, more = self._back(in_flight.popleft(), share=part.share)
                self.strategy.add_loss(loss, part)
                messages += more
        wait_all(messages)
        return self.strategy.finish()

    def _forward(self, batch: Batch, address: tuple[int, int] | None) -> InFlightMicroBatch:
        """Run one micro-batch through this stage. At its `address` the random generators are those of a single
        process."""
        batch = self.to_memory_format(batch)
        inputs, target = self.call.split(batch)
        received = self._channel.receive() if self._channel.before is not None else None
        if address is not None:
            self.rng.seed_step(*address)
            if received is not None:
                self.rng.set_state(received.rng_state)
        with self._autocast:
            left = self._measure((inputs, received.values if received else (), target))
        if self._channel.after is None:
            return InFlightMicroBatch(received, None, require_scalar(left))
        return InFlightMicroBatch(
            received, self._channel.send(left, self.rng.get_state() if address else b""), None
        )

    def _run_stage(self, given: tuple[Any, Any, Any]) -> Any:
        """Return the activations of this stage, or the loss in the last stage."""
        inputs, carried, target = given
        left = self.strategy.module(inputs, carried)
        return left if self._channel.after is not None else self.call.loss_of(left, target)

    def _back(self, passed: InFlightMicroBatch, *, share: float) -> tuple[Tensor, list[Sending]]:
        """Return the contribution of the micro-batch to the loss, and the sends in progress."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        if passed.loss is not None:
            if not passed.loss.requires_grad:
                raise invalid_loss("a value without a gradient", "a function of the model's output")
            value = passed.loss * share if share != 1.0 else passed.loss
            scaled = value if self.strategy.loss_factor == 1.0 else value * self.strategy.loss_factor
            self._differentiate(([scaled], None))
            loss = value.detach()
        elif passed.sent is not None:
            gradients = self._channel.receive_back(passed.sent)
            if gradients:
                self._differentiate((passed.sent.tensors, gradients))
        return loss, self._channel.send_back(passed.received) if passed.received is not None else []


ScheduledPass = tuple[Literal["forward", "backward"], int]


def schedule_1f1b(parts: int, *, later_stages: int) -> Iterator[ScheduledPass]:
    """Yield the passes of a stage with `later_stages` stages after it (one forward, one backward).

    At most `later_stages + 1` micro-batches are in flight. Each stage processes the micro-batches in order, so
    gradients accumulate as in one process.
    """
    ahead = min(parts, later_stages)
    yield from (("forward", number) for number in range(ahead))
    for number in range(parts - ahead):
        yield "forward", ahead + number
        yield "backward", number
    yield from (("backward", number) for number in range(parts - ahead, parts))
