"""A pipeline stage: a copy of the model that holds the tensors of one stage and runs its layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.parallel.pipeline.forward_graph import (
    ForwardGraph,
    attribute,
    cannot_partition,
    tensors_used,
)
from falaj.training.runtime.parallel.pipeline.partition import Partition

Change = Callable[[Tensor], Tensor]


def extract_stage(model: nn.Module, stages: Partition, number: int, *, device: torch.device) -> nn.Module:
    """Return a copy of `model` with the tensors of stage `number` on `device`; `model` itself releases them."""
    stage_of = stage_of_tensors(model, stages)
    named = dict(named_tensors(model))
    mine = {id(tensor) for name, tensor in named.items() if stage_of[name] == number}
    replace_tensors(model, lambda t: t if id(t) in mine else on_meta_device(t))
    own = {id(t): t for _, t in named_tensors(model) if id(t) in mine}
    try:
        part = copy.deepcopy(model, dict(own))
    except Exception as failure:
        raise cannot_partition(
            f"a model that cannot be copied: {failure}", fix="remove locks and files from it"
        ) from failure
    replace_tensors(model, on_meta_device)
    replace_tensors(part, lambda t: t if t.is_meta else moved(t, device))
    part.forward = StageRunner(part, stages, number)
    return part


def stage_of_tensors(model: nn.Module, stages: Partition) -> dict[str, int]:
    """Return the stage of each parameter and buffer; unused ones belong to the first."""
    found: dict[int, int] = {}
    for number, stage in enumerate(stages.places):
        for place in stage:
            for tensor in tensors_used(model, stages.graph.training[place]):
                found.setdefault(id(tensor), number)
    return {name: found.get(id(tensor), 0) for name, tensor in named_tensors(model)}


class StageRunner:
    """Runs the operations of one stage in place of the model's forward."""

    def __init__(self, part: nn.Module, stages: Partition, number: int) -> None:
        graph, self._stage = stages.graph, stages.places[number]
        self._part, self._graph = part, graph
        self._entering = boundary_values(graph, self._stage.start)
        self._leaving = boundary_values(graph, self._stage.stop)
        self._layers = {
            place: part.get_submodule(name) for place in self._stage if (name := graph.layer(place))
        }

    def __call__(self, inputs: Sequence[Any], carried: Sequence[Any]) -> Any:
        """Return the activations for the next stage, or the model's output."""
        nodes = self._graph.training if self._part.training else self._graph.evaluating
        values = {nodes[place]: value for place, value in zip(self._entering, carried, strict=True)}
        values |= self._given(nodes, inputs)
        for place in self._stage:
            node = nodes[place]
            if node.op == "output":
                return fx.map_arg(node.args[0], lambda each: self._value(values, each))
            if node.op not in ("placeholder", "get_attr"):
                values[node] = self._run(place, node, values)
        return [values[nodes[place]] for place in self._leaving]

    def _given(self, nodes: Sequence[fx.Node], inputs: Sequence[Any]) -> dict[fx.Node, Any]:
        wanted = [node for node in nodes if node.op == "placeholder"]
        required = [node for node in wanted if not node.args]
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            names = [str(node.target) for node in required]
            if set(names) == set(inputs[0]):  # passed as keywords
                inputs = [inputs[0][name] for name in names]
        if len(inputs) != len(required):
            allowed = f"{len(required)}: in a pipeline, parameters of forward that have a default keep it"
            fault = TrainingFault("data", f"{len(inputs)} inputs for the model", allowed)
            raise InvalidTraining("the data does not fit the model", faults=[fault])
        return {
            **{node: node.args[0] for node in wanted if node.args},
            **dict(zip(required, inputs, strict=True)),
        }

    def _run(self, place: int, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        args: Any = fx.map_arg(node.args, lambda each: self._value(values, each))
        options: Any = fx.map_arg(node.kwargs, lambda each: self._value(values, each))
        if node.op == "call_module":
            return self._layers[place](*args, **options)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **options)
        call: Any = node.target
        return call(*args, **options)

    def _value(self, values: Mapping[fx.Node, Any], node: fx.Node) -> Any:
        return attribute(self._part, node) if node.op == "get_attr" else values[node]


def boundary_values(graph: ForwardGraph, start: int) -> list[int]:
    """Return the nodes before `start` whose values are used after it; every process reads the inputs itself."""
    nodes = graph.training
    places = {node: place for place, node in enumerate(nodes)}
    needed = {places[each] for node in nodes[start:] for each in node.all_input_nodes}
    return sorted(p for p in needed if p < start and nodes[p].op not in ("placeholder", "get_attr"))


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return parameters and buffers, each once, in the same order in all processes."""
    return [*model.named_parameters(), *model.named_buffers()]


def replace_tensors(model: nn.Module, change: Change) -> None:
    """Replace each parameter and buffer by the result of `change`; shared tensors stay shared."""
    done: dict[int, tuple[Tensor, Tensor]] = {}  # the old one too, so that no other takes its number
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    if id(tensor) not in done:
                        done[id(tensor)] = tensor, change(tensor)
                    store[name] = done[id(tensor)][1]  # type: ignore[assignment]


def on_meta_device(tensor: Tensor) -> Tensor:
    return moved(tensor, torch.device("meta"))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`; a parameter stays a parameter, and the same one if it does not move."""
    if tensor.device == device:
        return tensor
    return like(tensor, tensor.detach().to(device))


def like(model: Tensor, tensor: Tensor) -> Tensor:
    """Return `tensor` as a parameter if `model` is one."""
    return (
        nn.Parameter(tensor, requires_grad=model.requires_grad) if isinstance(model, nn.Parameter) else tensor
    )
