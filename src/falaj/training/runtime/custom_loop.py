"""`step`: one training step by the fastest safe plan, for users with a training loop of their own.

    step = fj.step(model, loss, lr=3e-4, clip=1.0)
    for inputs, target in batches:
        print(step((inputs, target)))

A batch that is a tuple is (inputs…, target); any other batch is passed whole to the model and to the loss. The result
is the loss, detached and still on the device: on a GPU, reading it at every step synchronizes. The loop itself decides
about the batches, checkpoints and losses that are not finite.

The options are those of `fit`. `tune="auto"` searches for the fastest plan on the first batch, for a run of `steps`
steps. Without `seed` the random generators are not seeded; with it random numbers depend on the seed and the step only,
as in `fit`. Under torchrun each process passes its own part of the batch, with equally many rows in each (ranks that
share tensors pass the same rows), and the loss is the mean over all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn, optim

from falaj.training.runtime.data.dataloading.loaders import InlineLoader
from falaj.training.runtime.data.sources import Batch, TensorSource, map_tensors
from falaj.training.runtime.errors import CheckpointMismatch, InvalidTraining, TrainingFault
from falaj.training.runtime.options import FitOptions, Tune
from falaj.training.runtime.parallel.layout import Parallel, parallel_layout
from falaj.training.runtime.parallel.process_group import find_device, join_process_group
from falaj.training.runtime.parallel.tensor_plan import TensorPlan
from falaj.training.runtime.planning.numerics import apply_numerics
from falaj.training.runtime.planning.plan import CompileMode, Plan, Precision, plan_from
from falaj.training.runtime.planning.selection import select_plan
from falaj.training.runtime.step.calling import Loss
from falaj.training.runtime.step.cuda_graph import CudaGraphStep, list_tensors
from falaj.training.runtime.step.engine import (
    StepEngine,
    align_optimizer_state,
    can_use_cuda_graph,
    make_step,
)
from falaj.training.runtime.step.micro_batches import MicroBatch, MicroBatchIndices, MicroBatchReader
from falaj.training.runtime.step.model_checks import require_trainable
from falaj.training.runtime.step.non_persistent_buffers import restore_buffers
from falaj.training.runtime.step.optimizers import OptimizerChoice
from falaj.training.runtime.step.out_of_memory import can_split_locally

DEFAULT_STEPS = 1000


def step(
    model: nn.Module,
    loss: Loss,
    *,
    optimizer: OptimizerChoice = "adamw",
    lr: float = 1e-3,
    clip: float | None = None,
    accumulate: int | None = None,
    precision: Precision | None = None,
    compile: bool | CompileMode | None = None,  # noqa: A002 - the word that torch uses
    tune: Tune = "auto",
    tune_seconds: float | None = None,
    steps: int = DEFAULT_STEPS,
    parallel: Parallel = "auto",
    tensor_plan: TensorPlan | None = None,
    seed: int | None = None,
    device: str = "auto",
) -> TrainingStep:
    """Return a step that trains `model` in place: `step(batch)` returns the loss.

    A batch that is a tuple is (inputs…, target). The options are those of `fit`.

    `step.state_dict()` holds tensors and numbers that `torch.load(…, weights_only=True)` accepts;
    `step.load_state_dict` continues from there with the same plan.
    """
    options = FitOptions.from_keywords(
        batch_size="auto",
        steps=steps,
        seed=seed or 0,
        optimizer=optimizer,
        lr=lr,
        clip=clip,
        accumulate=accumulate,
        precision=precision,
        compile=compile,
        tune=tune,
        tune_seconds=tune_seconds,
        device=device,
        parallel=parallel,
        tensor_plan=tensor_plan,
    )
    return TrainingStep(model, loss, options, is_seeded=seed is not None)


class TrainingStep:
    """A callable that does one training step. The plan is chosen at the first call, unless it was given."""

    def __init__(self, model: nn.Module, loss: Loss, options: FitOptions, *, is_seeded: bool) -> None:
        self._model, self._loss, self._options = model, loss, options
        self._is_seeded = is_seeded
        self._world = join_process_group(find_device(options.compute.device))
        self._layout = parallel_layout(options.parallelism.parallel, self._world.size)
        if self._layout.pipeline > 1:
            fault = TrainingFault(
                "parallel", "pipeline", "ddp, fsdp, tensor", "fj.fit, which distributes its batches"
            )
            raise InvalidTraining("a pipeline needs its batches in advance", faults=[fault])
        require_trainable(model, loss)
        self._source = BatchSource()
        self._engine: StepEngine | None = None
        self._rates: list[Tensor] = []
        self._is_plain = True
        """Whether a step needs nothing around it: no learning rates for a CUDA graph, no numeric settings of torch."""
        self._seen: Tensor = torch.zeros(())
        self.number = 0
        """The number of steps done."""
        self.plan: Plan | None = None
        if options.compute.tune != "auto" or self._world.size > 1:
            self._build(select_plan(model, loss, self._source, options, None, self._world))

    def __call__(self, batch: Batch) -> Tensor:
        """Train on `batch` and return its loss."""
        indices = self._source.take(batch)
        engine = self._engine or self._search()
        self.number += 1
        if self._is_plain:
            engine.run_step(self.number, indices, self._see)
        else:
            self._take_rates(engine)
            with apply_numerics(engine.plan):
                engine.run_step(self.number, indices, self._see)
        return self._seen

    @property
    def optimizer(self) -> optim.Optimizer:
        """The optimizer. Its learning rate may be changed between steps, for example by a scheduler of torch."""
        return self._ready().step.optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is needed to continue, as tensors and numbers."""
        engine = self._ready()
        optimizer, scaler = engine.step.optimizer, engine.step.scaler
        return {
            "model": self._model.state_dict(),
            "buffers": engine.step.extra_buffers.changed(),
            "optimizer": {"class": type(optimizer).__name__, **with_plain_rates(optimizer.state_dict())},
            "scaler": scaler.state_dict() if scaler else {},
            "plan": self.plan.facts() if self.plan else {},
            "number": self.number,
            "pieces": engine.pieces,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Create a learning-rate scheduler after this call, not before.

        Of the optimizer's options only the learning rate is restored; the others are those of this step.
        """
        missing = {"model", "buffers", "optimizer", "scaler", "plan", "number", "pieces"} - state.keys()
        if missing:
            fault = TrainingFault(
                "state", f"without {', '.join(sorted(missing))}", "the result of state_dict()"
            )
            raise InvalidTraining("this is not the state of a step", faults=[fault])
        plan = plan_from(state["plan"])
        if self._world.device.type == "cpu":
            plan = replace(plan, graph=False)
        put_into_model(self._model, state["model"])
        if self._engine is None or plan.graph:  # a captured graph keeps its addresses
            self._build(plan)
        engine = self._ready()
        restore_buffers(self._model, self._loss, state["buffers"], self._world.device)
        put_into_optimizer(engine.step.optimizer, state["optimizer"])
        align_optimizer_state(engine.step.optimizer)
        if engine.step.scaler and state["scaler"]:
            engine.step.scaler.load_state_dict(state["scaler"])
        if state["pieces"]:
            engine.set_micro_batches(state["pieces"])
        self.number = state["number"]

    def _search(self) -> StepEngine:
        """Search for the fastest plan for batches like the first one, and return its engine."""
        columns, options = TensorSource(self._source.batch, where="batch"), self._options
        options = replace(options, batching=replace(options.batching, batch_size=self._source.rows))
        return self._build(select_plan(self._model, self._loss, columns, options, None, self._world))

    def _build(self, plan: Plan) -> StepEngine:
        world, options, layout = self._world, self._options, self._layout
        made = make_step(
            *(self._model, self._loss, options, plan),
            total=options.batching.steps or DEFAULT_STEPS,
            world=world,
            micro_batches=plan.micro_batches,
        )
        if not self._is_seeded:
            made.rng = UnseededRng()  # type: ignore[assignment]
        reader = LocalBatchReader(
            self._source, seed=options.batching.seed, count=plan.micro_batches, ways=layout.data
        )
        graph, self._rates = None, []
        if plan.graph and self._source.rows and can_use_cuda_graph(made, reader, world):
            graph = CudaGraphStep(made, self._source, batch_size=self._source.rows)
            self._rates = [_as_tensor(group, world.device) for group in made.optimizer.param_groups]
        can_split = can_split_locally(layout)
        self._engine = StepEngine(
            reader,
            InlineLoader(reader),
            made,
            plan=plan,
            graph=graph,
            world=world,
            can_split=can_split,
            notify=print,
        )
        self._engine.prepare(plan)
        self.plan = plan
        self._is_plain = graph is None and plan.threads is None and plan.precision != "tf32"
        return self._engine

    def _ready(self) -> StepEngine:
        if self._engine is None:
            fault = TrainingFault(
                "step", "no batch yet", "after the first step", 'tune="off", or load_state_dict'
            )
            raise InvalidTraining("the plan is chosen on the first batch", faults=[fault])
        return self._engine

    def _take_rates(self, engine: StepEngine) -> None:
        """Copy changed learning rates to the tensors that the CUDA graph reads."""
        for group, rate in zip(engine.step.optimizer.param_groups, self._rates, strict=bool(self._rates)):
            if group["lr"] is not rate:
                rate.fill_(group["lr"])
                group["lr"] = rate

    def _see(self, loss: Tensor) -> None:
        self._seen = loss


def _as_tensor(group: dict[str, Any], device: torch.device) -> Tensor:
    group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device)
    rate: Tensor = group["lr"]
    return rate


class BatchSource:
    """The current batch of the user's loop as a source of its rows."""

    def __init__(self) -> None:
        self.batch: Batch = None
        self.rows = 0
        self._places: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self.rows

    def take(self, batch: Batch) -> Tensor:
        """Set the current batch and return the indices of its rows."""
        first = batch[0] if isinstance(batch, tuple) and batch else batch
        tensors = [first] if isinstance(first, Tensor) else list_tensors(batch)
        if not tensors or not tensors[0].dim() or not len(tensors[0]):
            fault = TrainingFault(
                "batch", type(batch).__name__, "tensors with a row per sample", "(inputs, target)"
            )
            raise InvalidTraining("this batch cannot be trained on", faults=[fault])
        self.batch, self.rows = batch, len(tensors[0])
        if self.rows not in self._places:
            self._places[self.rows] = torch.arange(self.rows)
        return self._places[self.rows]

    def read(self, indices: Tensor, *, seed: int) -> Batch:
        if len(indices) == self.rows:
            return self.batch
        start, count = int(indices[0]), len(indices)
        return map_tensors(self.batch, lambda each: each[start : start + count] if each.dim() else each)


class LocalBatchReader(MicroBatchReader):
    """Splits the batch of this process, which is one of `ways` parts of the global batch."""

    def __init__(self, source: BatchSource, *, seed: int, count: int, ways: int) -> None:
        super().__init__(source, seed=seed, count=count)
        self._handed, self._ways = source, ways

    def read(self, step: int, indices: Tensor) -> list[MicroBatch]:
        if self.count == 1:
            return [MicroBatch(0, self._handed.batch, 1 / self._ways)]
        return super().read(step, indices)

    def split(self, indices: Tensor) -> Iterator[MicroBatchIndices]:
        found = super().split(indices)
        return found if self._ways == 1 else (cut._replace(share=cut.share / self._ways) for cut in found)


class UnseededRng:
    """A StepRng that does not seed: random numbers are drawn as they come."""

    def seed_step(self, step: int, micro_batch: int) -> None:
        pass


def with_plain_rates(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's `state` with learning rates as numbers, also where a CUDA graph reads tensors."""
    groups = [{**group, "lr": float(group["lr"])} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def put_into_model(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointMismatch(f"the state is of another model: {error}") from error


def put_into_optimizer(optimizer: optim.Optimizer, saved: Mapping[str, Any]) -> None:
    groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    kind, theirs = type(optimizer).__name__, saved["param_groups"]
    sizes = [[len(group["params"]) for group in each] for each in (groups, theirs)]
    if saved["class"] != kind or sizes[0] != sizes[1]:
        fault = TrainingFault(
            "optimizer", f"{kind} of {sizes[0]} parameters", f"{saved['class']} of {sizes[1]}"
        )
        raise CheckpointMismatch("the state is of another optimizer", faults=[fault])
    for own, their in zip(groups, theirs, strict=True):
        own |= {name: their[name] for name in ("lr", "initial_lr") if name in their}
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
