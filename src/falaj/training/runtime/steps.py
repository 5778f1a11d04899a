"""One training step: gradients over micro-batches in the chosen precision, then the optimizer's update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn, optim

from falaj.training.runtime.data import Batch, map_tensors, move
from falaj.training.runtime.errors import Fault, InvalidTraining
from falaj.training.runtime.randomness import Dice

Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)

Loss = Callable[[Any, Any], Tensor]
"""loss(model(inputs), target) -> a scalar: the mean over the samples of the batch."""


class Step:
    """What a step does to the model. `gradients` then `update`; between them the loss can be looked at.

    A batch that is a tuple is (inputs…, target); any other is given whole to the model and to the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: optim.Optimizer,
        *,
        device: torch.device,
        dice: Dice,
        precision: Precision = "fp32",
        accumulate: int = 1,
        clip: float | None = None,
        factor: Callable[[int], float] | None = None,
    ) -> None:
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self._run: Callable[..., Any] = model
        self._compile_failures: tuple[type[Exception], ...] = ()
        self._device, self._dice = device, dice
        self._autocast = autocast(precision, device)
        self.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        self._accumulate, self._clip, self._factor = accumulate, clip, factor
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def compile(self, say: Callable[[str], None]) -> None:
        """Compile the model at its first use; if that fails, say so and go on without."""
        from torch._dynamo.exc import TorchDynamoException

        self._run, self._compile_failures, self._say = torch.compile(self.model), (TorchDynamoException,), say

    def gradients(self, step: int, batch: Batch, size: int) -> Tensor:
        """The loss of a batch of `size` samples, detached, after its gradients were computed."""
        try:
            return self._gradients(step, batch, size)
        except self._compile_failures as failure:
            reason = str(failure).strip().split("\n")[0]
            self._say(f"step {step}: torch.compile failed ({reason}); going on without it")
            self._run, self._compile_failures = self.model, ()
            return self._gradients(step, batch, size)

    def update(self, step: int) -> None:
        """Move the parameters along their gradients."""
        if self._factor is not None:
            factor = self._factor(step)
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def measure(self, batch: Batch, *, run: Callable[..., Any] | None = None) -> Tensor:
        """The loss of `batch` in the chosen precision, through the model or its compiled form `run`."""
        run = run or self.model
        with self._autocast:
            inputs, target = (batch[:-1], batch[-1]) if isinstance(batch, tuple) else ((batch,), batch)
            value = self.loss(run(*inputs), target)
        if value.dim():
            raise _bad_loss(
                f"a tensor of shape {list(value.shape)}", "a scalar, such as the mean over the batch"
            )
        return value

    def _gradients(self, step: int, batch: Batch, size: int) -> Tensor:
        self.optimizer.zero_grad()
        batch = move(batch, self._device)
        if self._accumulate == 1:
            return self._backward(step, 0, batch, 1.0)
        width = -(-size // self._accumulate)
        total = torch.zeros((), device=self._device)
        for place, start in enumerate(range(0, size, width)):
            end = min(start + width, size)
            part = map_tensors(batch, partial(torch.narrow, dim=0, start=start, length=end - start))
            total += self._backward(step, place, part, (end - start) / size)
        return total

    def _backward(self, step: int, place: int, batch: Batch, share: float) -> Tensor:
        """The part of the loss that a micro-batch adds: `share` is its part of the batch's samples."""
        self._dice.roll(step, place)
        value = self.measure(batch, run=self._run)
        if not value.requires_grad:
            raise _bad_loss("a value without a gradient", "a function of the model's output")
        if share != 1.0:
            value = value * share
        scaled = value if self.scaler is None else self.scaler.scale(value)
        scaled.backward()  # type: ignore[no-untyped-call]
        return value.detach()


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """The context that computes in `precision`; it is entered again at every step."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if precision == "bf16" else torch.float16)


def _bad_loss(given: str, allowed: str) -> InvalidTraining:
    return InvalidTraining("the loss cannot be trained on", faults=[Fault("loss", given, allowed)])
