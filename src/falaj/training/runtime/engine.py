"""What runs the steps of a plan: reads the samples, computes, updates; smaller pieces where memory runs out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn, optim

from falaj.training.runtime.data import Columns, Source
from falaj.training.runtime.errors import Fault, InvalidTraining
from falaj.training.runtime.graphs import GraphedStep
from falaj.training.runtime.micro_batches import Reader
from falaj.training.runtime.optimizers import make_optimizer, make_schedule
from falaj.training.runtime.plan.plans import Plan
from falaj.training.runtime.randomness import Dice
from falaj.training.runtime.settings import Settings
from falaj.training.runtime.spread.choosing import spread_exactly, spread_over
from falaj.training.runtime.spread.layout import lay_out
from falaj.training.runtime.steps import Loss, Step
from falaj.training.runtime.world import World

Look = Callable[[Tensor], None]

RESIDENT_SHARE = 0.25
"""Tensors that take at most this part of a GPU's memory lie there while they are trained on."""


class Engine:
    """The steps of a run, one after the other."""

    def __init__(
        self,
        reader: Reader,
        step: Step,
        *,
        graph: GraphedStep | None,
        alone: bool,
        say: Callable[[str], None],
    ) -> None:
        self.reader, self.step = reader, step
        self._graph, self._alone, self._say = graph, alone, say

    def get_ready(self, plan: Plan) -> None:
        """What must wait until a checkpoint, if there is one, has been put into the model and the optimizer."""
        if plan.compile != "off":
            self.step.compile(self._say, mode=plan.compile)
        align_state(self.step.optimizer)
        if self._graph is not None:
            self._graph.take_rates()

    def advance(self, number: int, indices: Tensor, look: Look) -> None:
        """Do step `number`; `look` is given its loss, where there is no graph before the model is changed by it."""
        if self._graph is not None and self._graph.takes(indices):
            try:
                loss = self._graph.run(number, indices)
            except (
                RuntimeError
            ) as failure:  # an operation that cannot be captured, or no memory for the graph
                self._graph = None
                reason = str(failure).strip().split("\n")[0]
                self._say(f"step {number}: cannot be a CUDA graph ({reason}); going on without one")
            else:
                look(loss)
                return
        look(self.gradients(number, indices))
        self.step.update(number)

    def gradients(self, number: int, indices: Tensor) -> Tensor:
        """The loss of a step, and its gradients; if memory runs out, in smaller pieces from now on."""
        while True:
            try:
                return self.step.gradients(number, list(self.reader.read(number, indices)))
            except RuntimeError as failure:
                if not (self._alone and is_out_of_memory(failure) and self.reader.count < len(indices)):
                    raise
                reason = str(failure).strip().split("\n")[0]
            self.step.optimizer.zero_grad()
            self.step.spread.forget()
            if self.step.device.type == "cuda":
                torch.cuda.empty_cache()
            count = self.reader.halve()
            self._say(
                f"step {number}: out of memory ({reason}); the same global batch in {count} micro-batches from here on"
            )


def make_engine(
    model: nn.Module,
    loss: Loss,
    source: Source,
    settings: Settings,
    plan: Plan,
    *,
    batch_size: int,
    total: int,
    world: World,
    say: Callable[[str], None],
) -> Engine:
    """The engine that trains `model` as `plan` says. Compiling is left for later: a checkpoint may come first."""
    layout = lay_out(settings.spreading.parallel, world.size)
    source = resident(source, world.device)
    seed = settings.pace.seed
    reader = Reader(
        source, seed=seed, count=plan.micro_batches, rank=layout.data_rank(world.rank), size=layout.data
    )
    step = make_step(model, loss, settings, plan, total=total, world=world, micro_batches=reader.count)
    graph = None
    if plan.graph and can_be_graphed(step, reader, world):
        graph = GraphedStep(step, source, seed=seed, batch_size=batch_size, say=say)
    return Engine(reader, step, graph=graph, alone=world.size == 1 and not settings.spreading.exact, say=say)


def make_step(
    model: nn.Module,
    loss: Loss,
    settings: Settings,
    plan: Plan,
    *,
    total: int,
    world: World,
    micro_batches: int,
) -> Step:
    """The step over the parameters of `model` that can be trained, which is spread over the processes."""
    updates, spreading = settings.updates, settings.spreading
    images_last = plan.layout == "channels_last"
    model.to(world.device).train()
    if images_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    trainable(model)
    if spreading.exact:
        spread = spread_exactly(model, world, micro_batches=micro_batches)
    else:
        layout = lay_out(spreading.parallel, world.size)
        spread = spread_over(model, world, layout, tensor_plan=spreading.tensor_plan)
    optimizer = make_optimizer(
        updates.optimizer, trainable(model), lr=updates.lr, fused=plan.fused, capturable=plan.graph
    )
    return Step(
        model,
        loss,
        optimizer,
        device=world.device,
        dice=Dice(settings.pace.seed, world.device),
        spread=spread,
        precision=plan.precision,
        channels_last=images_last,
        clip=updates.clip,
        factor=make_schedule(updates.schedule, warmup=updates.warmup, steps=total),
    )


def can_be_graphed(step: Step, reader: Reader, world: World) -> bool:
    """One process, one piece, and no scaling of the loss: the rest is seen when it is captured."""
    return world.device.type == "cuda" and world.size == 1 and reader.count == 1 and step.scaler is None


def resident(source: Source, device: torch.device) -> Source:
    """`source` in the memory of `device`, if it is tensors and they are small beside it."""
    if device.type != "cuda" or not isinstance(source, Columns):
        return source
    total = torch.cuda.get_device_properties(device).total_memory
    return source.on(device) if source.size_bytes <= RESIDENT_SHARE * total else source


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that training changes; there must be one."""
    every = list(model.parameters())
    if any(nn.parameter.is_lazy(p) for p in every):
        fault = Fault(
            "model", "lazy parameters without a shape", fix="call the model once on a sample before"
        )
        raise InvalidTraining("the model is not ready", faults=[fault])
    free = [p for p in every if p.requires_grad]
    if not free:
        given = "all parameters are frozen" if every else "no parameters"
        fault = Fault("model", given, "at least one parameter with requires_grad=True")
        raise InvalidTraining("there is nothing to train", faults=[fault])
    return free


def align_state(optimizer: optim.Optimizer) -> None:
    """Lay the optimizer's tensors out as their parameters are: a fused update walks through both at once."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if (
                isinstance(value, Tensor)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def is_out_of_memory(failure: BaseException) -> bool:
    """On a GPU, and on a CPU, where torch has no type for it."""
    return isinstance(failure, torch.OutOfMemoryError) or "can't allocate memory" in str(failure)
