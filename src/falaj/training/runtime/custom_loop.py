"""`step`: one training step in the fastest safe way, for people who keep a loop of their own.

    step = fj.step(model, loss, lr=3e-4, clip=1.0)
    for inputs, target in batches:
        print(step((inputs, target)))

A batch that is a tuple is (inputs…, target); any other is given whole to the model and to the loss. What comes back is
the loss, detached and still on the device: on a GPU, reading it at every step makes the queue wait. The batches, when
to save, and what to do about a loss that is not finite are the loop's own affair.

The options are those of `fit`. `tune="auto"` looks for the fastest plan on the first batch, as if there were `steps`
steps like it. Without `seed`, random numbers are drawn as they come; with it they depend on the seed and the number of
the step alone, as in `fit`. Under torchrun each process is given its own part of the batch, as many rows as the others
(those that share tensors, the same ones), and the loss is the mean of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn, optim

from falaj.training.runtime.data.dataloading.loaders import InlineLoader
from falaj.training.runtime.data.sources import Batch, TensorSource
from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.handed import BatchSource, LocalBatchReader, UnseededRng
from falaj.training.runtime.options import (
    BatchOptions,
    ComputeOptions,
    EvaluationOptions,
    FitOptions,
    OptimizerOptions,
    ParallelOptions,
    Tune,
)
from falaj.training.runtime.parallel.layout import Parallel, parallel_layout
from falaj.training.runtime.parallel.process_group import find_device, join_process_group
from falaj.training.runtime.parallel.tensor_plan import TensorPlan
from falaj.training.runtime.planning.numerics import apply_numerics
from falaj.training.runtime.planning.plan import CompileMode, Plan, Precision, plan_from
from falaj.training.runtime.planning.selection import select_plan
from falaj.training.runtime.step.cuda_graph import CudaGraphStep
from falaj.training.runtime.step.engine import (
    StepEngine,
    align_optimizer_state,
    can_use_cuda_graph,
    make_step,
)
from falaj.training.runtime.step.model_checks import require_trainable
from falaj.training.runtime.step.non_persistent_buffers import restore_buffers
from falaj.training.runtime.step.optimizers import OptimizerChoice
from falaj.training.runtime.step.out_of_memory import can_split_locally
from falaj.training.runtime.step.step import Loss
from falaj.training.runtime.step_state import put_into_model, put_into_optimizer, with_plain_rates

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
    """A step that trains `model` in place: `step(batch)` gives the loss. See the top of this file.

    `step.state_dict()` is plain tensors and numbers, which `torch.load(…, weights_only=True)` takes;
    `step.load_state_dict` goes on from there, by the same plan.
    """
    compute = ComputeOptions(
        precision=precision,
        compile=compile,
        accumulate=accumulate,
        device=device,
        tune=tune,
        tune_seconds=tune_seconds,
    )
    options = FitOptions(
        batching=BatchOptions(batch_size="auto", steps=steps, epochs=None, drop_last=False, seed=seed or 0),
        optimization=OptimizerOptions(optimizer=optimizer, lr=lr, schedule="constant", warmup=0, clip=clip),
        compute=compute,
        parallelism=ParallelOptions(parallel=parallel, tensor_plan=tensor_plan),
        evaluation=EvaluationOptions(evaluate=None, evaluate_every=None, better="lower", patience=None),
        checkpoint_every=timedelta(minutes=1),
    )
    return TrainingStep(model, loss, options, is_seeded=seed is not None)


class TrainingStep:
    """Calls are steps. The plan is chosen at the first one, unless it was given."""

    def __init__(self, model: nn.Module, loss: Loss, options: FitOptions, *, is_seeded: bool) -> None:
        self._model, self._loss, self._options = model, loss, options
        self._is_seeded = is_seeded
        self._world = join_process_group(find_device(options.compute.device))
        self._layout = parallel_layout(options.parallelism.parallel, self._world.size)
        if self._layout.pipeline > 1:
            fault = TrainingFault(
                "parallel", "pipeline", "ddp, fsdp, tensor", "fj.fit, which hands its batches around"
            )
            raise InvalidTraining("a pipeline needs to see its batches in advance", faults=[fault])
        require_trainable(model, loss)
        self._source = BatchSource()
        self._engine: StepEngine | None = None
        self._rates: list[Tensor] = []
        self._is_plain = True
        """Whether nothing has to be done around a step: no rates for a graph, no settings of torch's."""
        self._seen: Tensor = torch.zeros(())
        self.number = 0
        """How many steps were done."""
        self.plan: Plan | None = None
        if options.compute.tune != "auto" or self._world.size > 1:
            self._build(select_plan(model, loss, self._source, options, None, self._world))

    def __call__(self, batch: Batch) -> Tensor:
        """Train on `batch`; its loss."""
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
        """The optimizer: its learning rate may be changed between steps, by a scheduler of torch's for example."""
        return self._ready().step.optimizer

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on, in tensors and numbers."""
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
        """Go on from `state`. A scheduler of the learning rate is to be made after this, not before.

        Of the optimizer's options only the learning rate is taken from there: the others are those of this step.
        """
        missing = {"model", "optimizer", "scaler", "plan", "number", "pieces"} - state.keys()
        if missing:
            fault = TrainingFault("state", f"without {', '.join(sorted(missing))}", "what state_dict gave")
            raise InvalidTraining("this is not the state of a step", faults=[fault])
        plan = plan_from(state["plan"])
        if self._world.device.type == "cpu":
            plan = replace(plan, graph=False)
        put_into_model(self._model, state["model"])
        if self._engine is None or plan.graph:  # what a graph has captured stays where it was
            self._build(plan)
        engine = self._ready()
        restore_buffers(
            self._model, self._loss, state.get("buffers", {}), self._world.device
        )  # older states have none
        put_into_optimizer(engine.step.optimizer, state["optimizer"])
        align_optimizer_state(engine.step.optimizer)
        if engine.step.scaler and state["scaler"]:
            engine.step.scaler.load_state_dict(state["scaler"])
        if state["pieces"]:
            engine.set_micro_batches(state["pieces"])
        self.number = state["number"]

    # ------------------------------------------------------------------------------------ beneath them

    def _search(self) -> StepEngine:
        """The engine of the fastest plan for batches like the first one."""
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
        """A graph reads learning rates from where they were: what was set in their place is written there."""
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
