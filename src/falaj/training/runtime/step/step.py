"""One training step: gradients over micro-batches in the chosen precision, then the optimizer update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn, optim

from falaj.training.runtime.data.sources import Batch, map_tensors, to_device
from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.parallel.strategies import ParallelStrategy
from falaj.training.runtime.planning.plan import CompileMode, Precision
from falaj.training.runtime.step.calling import BatchCall, Loss
from falaj.training.runtime.step.micro_batches import MicroBatch
from falaj.training.runtime.step.non_persistent_buffers import NonPersistentBuffers
from falaj.training.runtime.step.out_of_memory import first_line
from falaj.training.runtime.step.parameter_groups import ParameterGroupState
from falaj.training.runtime.step.rng import StepRng

PartWrapper = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""A function from the name and the function of a part of a step to a wrapped function."""


class Step:
    """One training step: `gradients`, then `update`; between them the loss can be checked.

    `call` passes a batch to the model and to the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: optim.Optimizer,
        *,
        device: torch.device,
        rng: StepRng,
        strategy: ParallelStrategy,
        precision: Precision = "fp32",
        channels_last: bool = False,
        clip: float | None = None,
        factor: Callable[[int], float] | None = None,
    ) -> None:
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.call = BatchCall(model, loss)
        self.strategy, self.rng, self.device = strategy, rng, device
        self._measure: Callable[[Batch], Tensor] = self._through_spread
        self._differentiate: Callable[[Tensor], object] = Tensor.backward
        self._compile_failures: tuple[type[Exception], ...] = ()
        self._channels_last = channels_last
        self._autocast = autocast_context(precision, device)
        self.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        self._clip, self._factor = clip, factor
        self.before_update: Callable[[], None] | None = None
        """Called before the model changes: it waits for a checkpoint that is being staged."""
        self.extra_buffers = NonPersistentBuffers(model, loss)
        self.groups = ParameterGroupState(optimizer, has_schedule=factor is not None)
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]  # a tensor is changed in place
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    @property
    def rates_change(self) -> bool:
        """Whether the learning rate depends on the step."""
        return self._factor is not None

    def compile(self, notify: Callable[[str], None], *, mode: CompileMode = "default") -> None:
        """Compile the model and the loss at their first use; if that fails, report it and continue without."""
        from torch._dynamo.exc import TorchDynamoException

        options: dict[str, Any] = {} if mode == "default" else {"mode": mode}
        if self.strategy.loss_factor == 1.0:
            self._measure = torch.compile(self._through_spread, **options)
        else:  # torch compiles a sharded model, but not the code around it
            run = torch.compile(self.strategy.module, **options)
            self._measure = lambda batch: self.call(run, batch)
        self._compile_failures, self._notify = (TorchDynamoException,), notify

    def observe(self, around: PartWrapper) -> Callable[[], None]:
        """Replace each part of a step by `around(name, part)` until the returned function is called."""
        measure, differentiate = self._measure, self._differentiate
        self._measure = watched = around("forward", measure)
        self._differentiate = around("backward", differentiate)
        self.update = around("optimizer", self.update)  # type: ignore[method-assign]

        def leave() -> None:
            if self._measure is watched:  # unless compiling has failed meanwhile
                self._measure = measure
            self._differentiate = differentiate
            del self.update

        return leave

    def gradients(self, step: int, parts: Sequence[MicroBatch]) -> Tensor:
        """Compute the gradients of this process's micro-batches, and return the detached loss of the global batch."""
        try:
            return self._gradients(step, parts)
        except self._compile_failures as failure:
            reason = first_line(failure)
            self._notify(f"step {step}: torch.compile failed ({reason}); continuing without it")
            self._measure, self._compile_failures = self._through_spread, ()
            self.strategy.discard_step()  # all parts are computed again
            return self._gradients(step, parts)

    def update(self, step: int) -> None:
        """Update the parameters."""
        if self.before_update is not None:
            self.before_update()
        self.set_rates(step)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self.clip()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def set_rates(self, step: int) -> None:
        """Set the learning rates of `step`; tensors that a CUDA graph reads are changed in place."""
        if self._factor is None:
            return
        factor = self._factor(step)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor

    def clip(self) -> None:
        if self._clip is not None:
            self.strategy.clip(self._parameters, self._clip)

    def measure(self, batch: Batch) -> Tensor:
        """Return the loss of `batch` in the chosen precision, through the model itself."""
        with self._autocast:
            return require_scalar(self.call(self.model, self.to_memory_format(batch)))

    def backward(self, batch: Batch) -> Tensor:
        """Compute the gradients of a batch on the device without splitting or scaling, and return the detached loss."""
        self.optimizer.zero_grad()
        with self._autocast:
            value = require_scalar(self._measure(batch))
        self._differentiate(value)
        return value.detach()

    @contextmanager
    def full_model(self) -> Iterator[nn.Module]:
        """Yield the model with all its tensors; a collective call."""
        yield self.model

    def finish_model(self) -> None:
        """Load the trained state into the caller's model at the end of a run. Here it is the same model."""

    def to_memory_format(self, batch: Batch) -> Batch:
        """Return `batch` in the memory format of the model."""
        return map_tensors(batch, channels_last) if self._channels_last else batch

    def _gradients(self, step: int, parts: Sequence[MicroBatch]) -> Tensor:
        self.optimizer.zero_grad()
        for part in parts:
            with self.strategy.micro_batch(last=part is parts[-1]):
                self.strategy.add_loss(self._backward(step, part), part)
        return self.strategy.finish()

    def _backward(self, step: int, part: MicroBatch) -> Tensor:
        """Compute the gradients of a micro-batch, and return its share of the loss."""
        self.rng.seed_step(step, part.place)
        batch = self.to_memory_format(to_device(part.batch, self.device))
        with self._autocast:
            value = require_scalar(self._measure(batch))
        if not value.requires_grad:
            raise invalid_loss("a value without a gradient", "a function of the model's output")
        if part.share != 1.0:
            value = value * part.share
        scaled = value if self.strategy.loss_factor == 1.0 else value * self.strategy.loss_factor
        scaled = scaled if self.scaler is None else self.scaler.scale(scaled)
        self._differentiate(scaled)
        return value.detach()

    def _through_spread(self, batch: Batch) -> Tensor:
        return self.call(self.strategy.module, batch)


def autocast_context(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context that computes in `precision`; it is entered at every step."""
    if precision in ("fp32", "tf32"):
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if precision == "bf16" else torch.float16)


def channels_last(tensor: Tensor) -> Tensor:
    """Return a batch of images in channels_last format; other tensors unchanged."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def require_scalar(value: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        raise invalid_loss(f"a {type(value).__name__}", "a tensor, from which a gradient can be computed")
    if value.dim():
        raise invalid_loss(
            f"a tensor of shape {list(value.shape)}", "a scalar, such as the mean over the batch"
        )
    if value.is_complex():
        raise invalid_loss("a complex number", "a real number, such as its absolute value")
    return value


def invalid_loss(given: str, allowed: str) -> InvalidTraining:
    fault = TrainingFault("loss", given, allowed, "loss=lambda out, target: (out - target).abs().mean()")
    return InvalidTraining("the loss cannot be trained on", faults=[fault])
