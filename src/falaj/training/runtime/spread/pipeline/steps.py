"""The training step of a pipeline: its micro-batches go through the stages one behind the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from falaj.training.runtime.data.sources import Batch, to_device
from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.plan.plans import CompileMode
from falaj.training.runtime.spread.pipeline.line import Arrived, Sending, Sent, settle
from falaj.training.runtime.spread.pipeline.pipeline import Pipeline
from falaj.training.runtime.spread.pipeline.turns import turns
from falaj.training.runtime.step.micro_batches import MicroBatch
from falaj.training.runtime.step.step import Step, invalid_loss, require_scalar


class Passed(NamedTuple):
    """A micro-batch between its forward and its backward pass: where it came from, and where it went."""

    arrived: Arrived | None
    sent: Sent | None
    loss: Tensor | None


class PipelinedStep(Step):
    """`model` is the part of this process. What leaves it goes to the next stage; the last one has the loss."""

    def __init__(self, pipeline: Pipeline, *args: Any, **options: Any) -> None:
        super().__init__(pipeline.part, *args, **options)
        self._pipeline, self._line = pipeline, pipeline.line
        self._measure: Callable[[Any], Any] = self._run_stage
        self._differentiate: Callable[[Any], object] = lambda given: torch.autograd.backward(*given)
        if self.scaler is not None:
            fault = TrainingFault(
                "precision", "fp16", "fp32, tf32 or bf16, with a pipeline", 'precision="bf16"'
            )
            raise InvalidTraining("a pipeline does not scale losses", faults=[fault])

    def compile(self, notify: Callable[[str], None], *, mode: CompileMode = "default") -> None:
        notify("a pipeline is not compiled: going on without")

    def measure(self, batch: Batch) -> Tensor:
        passed = self._forward(batch, None)
        if passed.sent is not None:
            settle(passed.sent.messages)
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
        under_way: deque[Passed] = deque()
        messages: list[Sending] = []
        for turn, number in turns(len(parts), behind=self._pipeline.behind):
            part = parts[number]
            if turn == "forward":
                batch = to_device(part.batch, self.device)
                under_way.append(self._forward(batch, (step, part.place)))
            else:
                with self.spread.part(last=part is parts[-1]):
                    loss, more = self._back(under_way.popleft(), share=part.share)
                self.spread.add(loss, part)
                messages += more
        settle(messages)
        return self.spread.finish()

    def _forward(self, batch: Batch, address: tuple[int, int] | None) -> Passed:
        """One micro-batch through this stage. At its `address` the dice stand as they would in one process."""
        batch = self.to_memory_format(batch)
        inputs, target = (batch[:-1], batch[-1]) if isinstance(batch, tuple) else ((batch,), batch)
        arrived = self._line.receive() if self._line.before is not None else None
        if address is not None:
            self.rng.seed_step(*address)
            if arrived is not None:
                self.rng.set_state(arrived.rng)
        with self._autocast:
            left = self._measure((inputs, arrived.values if arrived else (), target))
        if self._line.after is None:
            return Passed(arrived, None, require_scalar(left))
        return Passed(arrived, self._line.send(left, self.rng.get_state() if address else b""), None)

    def _run_stage(self, given: tuple[Any, Any, Any]) -> Any:
        """What leaves this stage; the loss, where it is the last."""
        inputs, carried, target = given
        left = self.spread.run(inputs, carried)
        return left if self._line.after is not None else self.loss(left, target)

    def _back(self, passed: Passed, *, share: float) -> tuple[Tensor, list[Sending]]:
        """What the micro-batch adds to the loss, and the messages that are under way."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        if passed.loss is not None:
            if not passed.loss.requires_grad:
                raise invalid_loss("a value without a gradient", "a function of the model's output")
            value = passed.loss * share if share != 1.0 else passed.loss
            scaled = value if self.spread.factor == 1.0 else value * self.spread.factor
            self._differentiate(([scaled], None))
            loss = value.detach()
        elif passed.sent is not None:
            gradients = self._line.receive_back(passed.sent)
            if gradients:
                self._differentiate((passed.sent.tensors, gradients))
        return loss, self._line.send_back(passed.arrived) if passed.arrived is not None else []
