"""The forward pass of a model as a list of operations that different processes can run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.step.modes import ensure_training_mode, preserved_modes

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ALLOWED = (
    "nn.Sequential (also nested), or a forward that calls its layers without looking at values or shapes"
)
FIX = "model = nn.Sequential(*layers), with each layer a module"


@dataclass(frozen=True)
class ForwardGraph:
    """The operations of a forward pass in order: layers as a whole, and the operations between them.

    `training` and `evaluating` differ only in constants, such as whether dropout is applied.
    """

    training: Sequence[fx.Node]
    evaluating: Sequence[fx.Node]
    inputs: int
    """The number of inputs of the forward pass; those with a default keep it."""

    def layer(self, place: int) -> str | None:
        """Return the name of the layer that is called at `place`, or None."""
        node = self.training[place]
        return str(node.target) if node.op == "call_module" else None


def trace_forward(model: nn.Module) -> ForwardGraph:
    """Return the graph of `model`. Raise InvalidTraining if it cannot be traced symbolically."""
    try:
        with preserved_modes(model):
            first, again = _trace(ensure_training_mode(model)), _trace(model)
            evaluating = _trace(model.eval())
    except InvalidTraining:
        raise
    except Exception as failure:  # any error of the model on symbolic values
        reason = str(failure).strip().split("\n")[0]
        raise cannot_partition(
            f"{type(model).__name__}, whose forward cannot be traced: {reason}"
        ) from failure
    if _node_texts(first) != _node_texts(again) or _calls(first) != _calls(evaluating):
        raise cannot_partition(f"{type(model).__name__}, whose forward is not deterministic")
    inputs = sum(node.op == "placeholder" and not node.args for node in first)
    return ForwardGraph(first, evaluating, inputs)


def tensors_used(model: nn.Module, node: fx.Node) -> Iterator[Tensor]:
    """Yield the parameters and buffers that an operation uses."""
    if node.op == "call_module":
        layer = model.get_submodule(str(node.target))
        yield from (*layer.parameters(), *layer.buffers())
    yield from (attribute(model, each) for each in node.all_input_nodes if each.op == "get_attr")


def attribute(model: nn.Module, node: fx.Node) -> Any:
    """Return the current value of an attribute of the model."""
    found: Any = model
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found


def cannot_partition(
    given: str, *, where: str = "model", allowed: str = ALLOWED, fix: str = FIX
) -> InvalidTraining:
    fault = TrainingFault(where, given, allowed, fix)
    return InvalidTraining("the model cannot be cut into the stages of a pipeline", faults=[fault])


class _Layers(fx.Tracer):
    """Traces the model's own forward and plain sequences; every other module is one operation."""

    proxy_buffer_attributes = True  # otherwise operations on buffers would run once, at tracing time

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        plain = type(m).forward is nn.Sequential.forward
        return not plain or any(getattr(m, hooks, None) for hooks in HOOKS)


def _trace(model: nn.Module) -> Sequence[fx.Node]:
    if any(getattr(model, hooks, None) for hooks in HOOKS):
        raise cannot_partition("a model with hooks", allowed="hooks on its layers only")
    before = set(vars(model))
    graph = _Layers().trace(model, concrete_args=_defaults(model))
    made = [name for name in vars(model) if name not in before]
    for name in made:
        delattr(model, name)
    if made:
        given = f"{type(model).__name__}, whose forward makes a tensor that does not come from its inputs"
        raise cannot_partition(
            given,
            allowed="parameters, buffers, and tensors that are created like an input",
            fix="register_buffer",
        )
    return [node for node in graph.nodes if not _is_check(node)]


def _defaults(model: nn.Module) -> dict[str, Any]:
    parameters = inspect.signature(model.forward).parameters.values()
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters):
        raise cannot_partition(
            f"forward{inspect.signature(model.forward)}", allowed="a forward with named parameters"
        )
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def _is_check(node: fx.Node) -> bool:
    """Return whether this node asserts a default value, which is never passed here."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in (
        "_assert",
        "_assert_is_none",
    )


def _node_texts(nodes: Sequence[fx.Node]) -> list[str]:
    return [f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}" for node in nodes]


def _calls(nodes: Sequence[fx.Node]) -> list[tuple[str, str, int]]:
    return [(node.op, str(node.target), len(node.all_input_nodes)) for node in nodes]
