"""One training step: gradients over micro-batches in the chosen precision, then the optimizer's update."""

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
from falaj.training.runtime.step.micro_batches import MicroBatch
from falaj.training.runtime.step.non_persistent_buffers import NonPersistentBuffers
from falaj.training.runtime.step.parameter_groups import ParameterGroupState
from falaj.training.runtime.step.rng import StepRng

Loss = Callable[[Any, Any], Tensor]
"""loss(model(inputs), target) -> a scalar: the mean over the samples of the batch."""

PartWrapper = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Given the name of a part of a step, and what does it: the same with something around it."""


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
        rng: StepRng,
        strategy: ParallelStrategy,
        precision: Precision = "fp32",
        channels_last: bool = False,
        clip: float | None = None,
        factor: Callable[[int], float] | None = None,
    ) -> None:
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.strategy, self.rng, self.device = strategy, rng, device
        self._measure: Callable[[Batch], Tensor] = self._through_spread
        self._differentiate: Callable[[Tensor], object] = Tensor.backward
        self._compile_failures: tuple[type[Exception], ...] = ()
        self._channels_last = channels_last
        self._autocast = autocast_context(precision, device)
        self.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        self._clip, self._factor = clip, factor
        self.before_update: Callable[[], None] | None = None
        """What must be over before the model changes: a checkpoint that is being copied."""
        self.extra_buffers = NonPersistentBuffers(model, loss)
        self.groups = ParameterGroupState(optimizer, has_schedule=factor is not None)
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]  # a tensor is changed in place
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    @property
    def rates_change(self) -> bool:
        """Whether the learning rate depends on the step."""
        return self._factor is not None

    def compile(self, notify: Callable[[str], None], *, mode: CompileMode = "default") -> None:
        """Compile the model and the loss at their first use; if that fails, say so and go on without."""
        from torch._dynamo.exc import TorchDynamoException

        options: dict[str, Any] = {} if mode == "default" else {"mode": mode}
        if self.strategy.loss_factor == 1.0:
            self._measure = torch.compile(self._through_spread, **options)
        else:  # torch knows how to compile a model of shards, but not what is around it
            run = torch.compile(self.strategy.module, **options)
            self._measure = lambda batch: self._apply(run, batch)
        self._compile_failures, self._notify = (TorchDynamoException,), notify

    def observe(self, around: PartWrapper) -> Callable[[], None]:
        """Have `around(name, part)` in place of each part of a step until what is returned is called."""
        measure, differentiate = self._measure, self._differentiate
        self._measure = watched = around("forward", measure)
        self._differentiate = around("backward", differentiate)
        self.update = around("optimizer", self.update)  # type: ignore[method-assign]

        def leave() -> None:
            if self._measure is watched:  # else compiling has failed meanwhile
                self._measure = measure
            self._differentiate = differentiate
            del self.update

        return leave

    def gradients(self, step: int, parts: Sequence[MicroBatch]) -> Tensor:
        """The loss of a global batch, detached, after its gradients were computed; `parts` are this process's."""
        try:
            return self._gradients(step, parts)
        except self._compile_failures as failure:
            reason = str(failure).strip().split("\n")[0]
            self._notify(f"step {step}: torch.compile failed ({reason}); going on without it")
            self._measure, self._compile_failures = self._through_spread, ()
            self.strategy.discard_step()  # the parts that went well are computed again too
            return self._gradients(step, parts)

    def update(self, step: int) -> None:
        """Move the parameters along their gradients."""
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
        """The learning rates of `step`; those that a CUDA graph reads are tensors, and stay where they are."""
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
        """The loss of `batch` in the chosen precision, through the model as it is."""
        with self._autocast:
            return require_scalar(self._apply(self.model, self.to_memory_format(batch)))

    def backward(self, batch: Batch) -> Tensor:
        """The loss of `batch`, which lies on the device, after its gradients were computed; no parts, no scaling."""
        self.optimizer.zero_grad()
        with self._autocast:
            value = require_scalar(self._measure(batch))
        self._differentiate(value)
        return value.detach()

    @contextmanager
    def full_model(self) -> Iterator[nn.Module]:
        """The model with all its tensors, for as long as this lasts; all processes ask for it at once."""
        yield self.model

    def finish_model(self) -> None:
        """At the end of a run: the caller's model is the trained one. Here it is that one all along."""

    def to_memory_format(self, batch: Batch) -> Batch:
        """`batch` with its images in the layout that the model has."""
        return map_tensors(batch, channels_last) if self._channels_last else batch

    def _gradients(self, step: int, parts: Sequence[MicroBatch]) -> Tensor:
        self.optimizer.zero_grad()
        for part in parts:
            with self.strategy.micro_batch(last=part is parts[-1]):
                self.strategy.add_loss(self._backward(step, part), part)
        return self.strategy.finish()

    def _backward(self, step: int, part: MicroBatch) -> Tensor:
        """What a micro-batch adds to the loss, after its gradients were computed."""
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
        return self._apply(self.strategy.module, batch)

    def _apply(self, run: Callable[..., Any], batch: Batch) -> Tensor:
        inputs, target = (batch[:-1], batch[-1]) if isinstance(batch, tuple) else ((batch,), batch)
        return self.loss(run(*inputs), target)


def autocast_context(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """The context that computes in `precision`; it is entered again at every step."""
    if precision in ("fp32", "tf32"):
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if precision == "bf16" else torch.float16)


def channels_last(tensor: Tensor) -> Tensor:
    """An image (or a batch of them) with its channels innermost; anything else as it is."""
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
