"""Runs the steps of a plan: loads batches, computes, updates; with more micro-batches where memory runs out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn, optim

from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.data.dataloading.loaders import BatchLoader
from falaj.training.runtime.data.dataloading.selection import make_loader
from falaj.training.runtime.data.sources import Batch, DatasetSource, SampleSource, TensorSource
from falaj.training.runtime.errors import InvalidTraining, TrainingError, TrainingFault
from falaj.training.runtime.options import FitOptions, ParallelOptions
from falaj.training.runtime.parallel.layout import parallel_layout
from falaj.training.runtime.parallel.parallelization import (
    parallelize,
    parallelize_exactly,
    parallelize_pipeline,
)
from falaj.training.runtime.parallel.pipeline.pipelined_model import PipelinedModel
from falaj.training.runtime.parallel.pipeline.step import PipelinedStep
from falaj.training.runtime.parallel.process_group import ProcessGroup
from falaj.training.runtime.parallel.strategies import ParallelStrategy
from falaj.training.runtime.planning.plan import Plan
from falaj.training.runtime.step.calling import Loss
from falaj.training.runtime.step.cuda_graph import CudaGraphStep
from falaj.training.runtime.step.first_step import errors_for_broadcast_targets, explain_failure
from falaj.training.runtime.step.micro_batches import MicroBatchReader
from falaj.training.runtime.step.model_checks import shape_faults
from falaj.training.runtime.step.modes import ensure_training_mode
from falaj.training.runtime.step.optimizers import make_optimizer, make_schedule
from falaj.training.runtime.step.out_of_memory import (
    can_split_locally,
    first_line,
    is_out_of_memory,
    out_of_memory_error,
)
from falaj.training.runtime.step.rng import StepRng
from falaj.training.runtime.step.step import Step

LossCallback = Callable[[Tensor], None]

RESIDENT_SHARE = 0.25
"""Training tensors of at most this share of a GPU's memory are kept on the GPU."""


class StepEngine:
    """Runs the steps of a training run."""

    def __init__(
        self,
        reader: MicroBatchReader,
        loader: BatchLoader,
        step: Step,
        *,
        plan: Plan,
        graph: CudaGraphStep | None,
        world: ProcessGroup,
        can_split: bool,
        notify: Callable[[str], None],
    ) -> None:
        """`can_split`: whether a process may split its part of a batch without the others."""
        self.reader, self.loader, self.step, self.plan = reader, loader, step, plan
        self._graph, self._world, self._can_split, self._notify = graph, world, can_split, notify
        self._has_run = False
        self.pieces = 0
        """The number of micro-batches since memory ran out; 0 if it never did."""

    @property
    def waited_s(self) -> float:
        """Seconds in which steps waited for samples."""
        return self.loader.waited_s

    @property
    def hidden_s(self) -> float:
        """Seconds of reading that overlapped with computation."""
        return max(0.0, self.loader.reading_s - self.loader.waited_s)

    def close(self) -> None:
        """Close the loader, and remove all hooks from the model."""
        self.step.strategy.remove_hooks()
        self.loader.close()

    def prepare(self, plan: Plan) -> None:
        """Prepare what must follow the restore of a checkpoint: compilation, state layout, learning rates."""
        if plan.compile != "off":
            self.step.compile(self._notify, mode=plan.compile)
        align_optimizer_state(self.step.optimizer)
        if self._graph is not None:
            self._graph.take_rates()

    def run_step(self, number: int, indices: Tensor, on_loss: LossCallback) -> None:
        """Run step `number`; `on_loss` gets its loss, without a CUDA graph before the model is updated."""
        if self._graph is not None and self._graph.takes(indices):
            try:
                parts = [] if self._graph.reads else self.loader.take(number, indices)
                if self.step.before_update is not None:
                    self.step.before_update()
                loss = self._graph.run(number, indices, parts[0].batch if parts else None)
            except RuntimeError as failure:  # an operation cannot be captured, or no memory
                self._graph = None
                reason = first_line(failure)
                self._notify(
                    f"step {number}: cannot be captured as a CUDA graph ({reason}); continuing without it"
                )
            else:
                on_loss(loss)
                self.loader.prefetch_next(number)
                return
        on_loss(self.gradients(number, indices) if self._has_run else self._first_gradients(number, indices))
        try:
            self.step.update(number)
        except (RuntimeError, MemoryError) as failure:  # a partial update cannot be retried
            if not is_out_of_memory(failure):
                raise
            raise out_of_memory_error(number, self.reader.count, failure) from failure
        self.loader.prefetch_next(number)

    def _first_gradients(self, number: int, indices: Tensor) -> Tensor:
        """Compute the first gradients; an error of the model or the loss names the layer and the shapes."""
        try:
            with errors_for_broadcast_targets():
                loss = self.gradients(number, indices)
        except TrainingError:
            raise
        except Exception as failure:
            batch: Batch = None
            with suppress(Exception):  # a GPU may be unusable now
                batch = self.loader.take(number, indices)[0].batch
            explained = explain_failure(failure, self.step.model, batch)
            if explained is failure:
                raise
            raise explained from failure
        self._has_run = True
        return loss

    def gradients(self, number: int, indices: Tensor) -> Tensor:
        """Compute the gradients of a step, and return its loss; split into more micro-batches if memory runs out."""
        if self._world.size > 1 and self._world.is_agreed("halve"):
            self._world.clear_request("halve")
            self.set_micro_batches(self._world.maximum(self.reader.count))
        shortage: BaseException | None = None
        while True:
            try:
                return self.step.gradients(number, self.loader.take(number, indices))
            except (RuntimeError, MemoryError, ValueError) as failure:
                if not is_out_of_memory(failure):
                    if shortage is None:
                        raise
                    # the model needs more samples at once, or other processes have continued
                    raise out_of_memory_error(number, self.reader.count, shortage) from failure
                if not self._can_split or self.reader.count >= len(indices):
                    smallest = self.reader.count >= len(indices)
                    raise out_of_memory_error(
                        number, self.reader.count, failure, smallest=smallest
                    ) from failure
                shortage = failure.with_traceback(None)  # its frames would keep tensors alive
            self._halve(number, shortage)

    def set_micro_batches(self, pieces: int) -> None:
        """Use this many micro-batches from now on, as found by this run or before it was resumed."""
        self.reader.set_count(pieces)
        self.pieces = self.reader.count
        if self.pieces > 1:
            self._graph = None  # a CUDA graph computes a whole batch

    def _halve(self, number: int, shortage: BaseException) -> None:
        self.step.optimizer.zero_grad()
        self.step.strategy.discard_step()
        if self.step.device.type == "cuda":
            torch.cuda.empty_cache()
        self.set_micro_batches(2 * self.reader.count)
        world, where = self._world, ""
        if world.size > 1:  # the other processes follow after the same step
            world.requests.add("halve")
            where = f" in process {world.rank}"
        self._notify(
            f"step {number}: out of memory{where} ({first_line(shortage)}); continuing with "
            f"{self.reader.count} micro-batches per global batch"
        )


def make_engine(
    model: nn.Module,
    loss: Loss,
    source: SampleSource,
    options: FitOptions,
    plan: Plan,
    *,
    batches: BatchPlan,
    total: int,
    world: ProcessGroup,
    notify: Callable[[str], None],
    endless: bool = False,
) -> StepEngine:
    """Return the engine that trains `model` by `plan`. It compiles later, since a checkpoint may be restored first.

    Samples are prefetched up to the step `total`, or without an end. Workers are started before the GPU is.
    """
    layout = parallel_layout(options.parallelism.parallel, world.size)
    source = to_resident(source, world.device)
    seed = options.batching.seed
    reader = MicroBatchReader(
        source, seed=seed, count=plan.micro_batches, rank=layout.data_rank(world.rank), size=layout.data
    )
    last = sys.maxsize if endless else total
    loader, plan = make_loader(reader, batches, plan, world.device, last=last, notify=notify)
    step = make_step(model, loss, options, plan, total=total, world=world, micro_batches=reader.count)
    step.rng.always_seeds_python = isinstance(source, DatasetSource)
    graph = None
    if plan.graph and can_use_cuda_graph(step, reader, world):
        graph = CudaGraphStep(step, source, batch_size=batches.batch_size)
    can_split = not options.parallelism.exact and can_split_locally(layout)
    return StepEngine(
        reader, loader, step, plan=plan, graph=graph, world=world, can_split=can_split, notify=notify
    )


def make_step(
    model: nn.Module,
    loss: Loss,
    options: FitOptions,
    plan: Plan,
    *,
    total: int,
    world: ProcessGroup,
    micro_batches: int,
) -> Step:
    """Return the step over the trainable parameters of `model`, which is distributed over the processes."""
    optimization, parallelism = options.optimization, options.parallelism
    images_last = plan.layout == "channels_last"
    trainable_parameters(model)
    if isinstance(loss, nn.Module):  # its class weights, for example
        loss.to(world.device)
    if images_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    strategy, pipeline = parallelize_model(
        ensure_training_mode(model), world, parallelism, micro_batches=micro_batches
    )
    part = pipeline.part if pipeline else model
    graph = plan.graph and world.device.type == "cuda"
    optimizer = make_optimizer(
        optimization.optimizer,
        trainable_parameters(part),
        lr=optimization.lr,
        fused=plan.fused,
        capturable=graph,
    )
    require_own_parameters(optimizer, part)
    step: Callable[..., Step] = partial(PipelinedStep, pipeline) if pipeline else partial(Step, model)
    return step(
        loss,
        optimizer,
        device=world.device,
        rng=StepRng(options.batching.seed, world.device),
        strategy=strategy,
        precision=plan.precision,
        channels_last=images_last,
        clip=optimization.clip,
        factor=make_schedule(optimization.schedule, warmup=optimization.warmup, steps=total),
    )


def parallelize_model(
    model: nn.Module, world: ProcessGroup, parallelism: ParallelOptions, *, micro_batches: int
) -> tuple[ParallelStrategy, PipelinedModel | None]:
    """Distribute `model` over the devices of the processes; with a pipeline no device holds all of it."""
    layout = parallel_layout(parallelism.parallel, world.size)
    if layout.pipeline > 1:
        pipeline, strategy = parallelize_pipeline(
            model, world, layout, tensor_plan=parallelism.tensor_plan, cuts=parallelism.pipeline_cuts
        )
        return strategy, pipeline
    model.to(world.device)
    if parallelism.exact:
        return parallelize_exactly(model, world, micro_batches=micro_batches), None
    return parallelize(model, world, layout, tensor_plan=parallelism.tensor_plan), None


def require_own_parameters(optimizer: optim.Optimizer, model: nn.Module) -> None:
    """Raise InvalidTraining for an optimizer over other parameters, made before the model was sharded."""
    own = {id(parameter) for parameter in model.parameters()}
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if all(id(parameter) in own for parameter in updated):
        return
    given = f"{type(optimizer).__name__} over parameters that are not the model's; sharding a model creates new ones"
    fix = "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
    fault = TrainingFault("optimizer", given, "a name, or a function from parameters to an optimizer", fix)
    raise InvalidTraining("the optimizer would not train this model", faults=[fault])


def can_use_cuda_graph(step: Step, reader: MicroBatchReader, world: ProcessGroup) -> bool:
    """Return whether a CUDA graph may work: one process, one micro-batch and no loss scaling."""
    return world.device.type == "cuda" and world.size == 1 and reader.count == 1 and step.scaler is None


def to_resident(source: SampleSource, device: torch.device) -> SampleSource:
    """Return `source` on `device` if it is tensors that are small enough."""
    return source.on(device) if isinstance(source, TensorSource) and is_resident(source, device) else source


def is_resident(columns: TensorSource, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return columns.size_bytes <= RESIDENT_SHARE * torch.cuda.get_device_properties(device).total_memory


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters; raise InvalidTraining if there are none."""
    every = list(model.parameters())
    if faults := shape_faults(model):
        raise InvalidTraining("the model is not ready", faults=faults)
    free = [p for p in every if p.requires_grad and not p.is_meta]
    if not free:
        given = "all parameters are frozen" if every else "no parameters"
        fault = TrainingFault("model", given, "at least one parameter with requires_grad=True")
        raise InvalidTraining("there is nothing to train", faults=[fault])
    return free


def align_optimizer_state(optimizer: optim.Optimizer) -> None:
    """Give the optimizer's tensors the strides of their parameters, as a fused update requires."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if (
                isinstance(value, Tensor)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
