"""Find which channels of a torch graph can be removed together, and remove those with the smallest weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

ELEMENTWISE = frozenset(
    {
        *(
            "relu",
            "relu_",
            "relu6",
            "gelu",
            "silu",
            "silu_",
            "hardswish",
            "hardswish_",
            "hardtanh",
            "hardtanh_",
        ),
        *(
            "hardsigmoid",
            "sigmoid",
            "tanh",
            "elu",
            "leaky_relu",
            "dropout",
            "dropout_",
            "clone",
            "contiguous",
        ),
    }
)
POOLS = frozenset({"adaptive_avg_pool2d", "avg_pool2d", "max_pool2d"})
ARITHMETIC = frozenset({"add", "add_", "mul", "mul_", "sub"})
NORMALIZED = 1
"""The place of a batch normalization's weight among its arguments; bias, mean and variance follow."""


@dataclass(eq=False)
class ChannelGroup:
    """Channels that are kept or removed together: the parameters and their dimensions, and who makes the channels."""

    width: int
    slots: list[tuple[str, int]] = field(default_factory=list)
    producers: list[str] = field(default_factory=list)
    scales: list[str] = field(default_factory=list)
    depthwise: list[fx.Node] = field(default_factory=list)
    blocked: bool = False


@dataclass(frozen=True)
class Channels:
    """The channels of a node's output: the number of their group, and their dimension."""

    group: int
    axis: int


def channel_groups(module: fx.GraphModule) -> list[ChannelGroup]:
    """Return the groups whose channels can be removed. What passes through an unknown operator cannot."""
    tracing = _Tracing(module)
    for node in module.graph.nodes:
        tracing.visit(node)
    return [each for each in tracing.merged() if not each.blocked and each.producers]


def remove_channels(
    module: fx.GraphModule, groups: list[ChannelGroup], *, share: float, least: int = 8
) -> int:
    """Remove `share` of the channels of each group, those with the smallest weights; return how many were removed."""
    removed = 0
    for group in groups:
        count = max(least, round(group.width * (1 - share) / least) * least)
        if count >= group.width:
            continue
        kept = torch.topk(_importance(module, group), count).indices.sort().values
        for name, dimension in group.slots:
            _replace(module, name, _tensor(module, name).detach().index_select(dimension, kept))
        for node in group.depthwise:
            node.args = (*node.args[:6], count)
        removed += group.width - count
    module.recompile()
    return removed


class _Tracing:
    """Follows channels through the graph, and joins the groups of tensors that are added or multiplied."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._groups: list[ChannelGroup] = []
        self._parents: list[int] = []
        self._channels: dict[fx.Node, Channels] = {}

    def visit(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            return
        name = _operator(node)
        handler = self._handler(name)
        if handler is None or not handler(node):
            self._block(node)

    def merged(self) -> Iterator[ChannelGroup]:
        """Yield one group for all that were joined."""
        joined: dict[int, list[ChannelGroup]] = {}
        for number, group in enumerate(self._groups):
            joined.setdefault(self._root(number), []).append(group)
        for parts in joined.values():
            yield ChannelGroup(
                parts[0].width,
                [slot for part in parts for slot in part.slots],
                [name for part in parts for name in part.producers],
                [name for part in parts for name in part.scales],
                [node for part in parts for node in part.depthwise],
                any(part.blocked for part in parts) or len({part.width for part in parts}) > 1,
            )

    def _handler(self, name: str) -> Callable[[fx.Node], bool] | None:
        if name in ELEMENTWISE or name in POOLS:
            return self._pass
        if name in ARITHMETIC:
            return self._join
        return {
            "conv2d": self._convolution,
            "linear": self._linear,
            "batch_norm": self._normalization,
            "flatten": self._flatten,
        }.get(name)

    def _pass(self, node: fx.Node) -> bool:
        found = self._of(node.args[0])
        if found is not None:
            self._channels[node] = found
        return True

    def _join(self, node: fx.Node) -> bool:
        tensors = [each for each in node.args[:2] if isinstance(each, fx.Node)]
        found = [self._of(each) for each in tensors]
        if any(each is None for each in found) or len({each.axis for each in found if each}) != 1:
            return False
        if len(found) == 2 and found[0] and found[1]:
            self._parents[self._root(found[1].group)] = self._root(found[0].group)
        if found[0]:
            self._channels[node] = found[0]
        return True

    def _convolution(self, node: fx.Node) -> bool:
        weight = _name(node.args[1])
        bias = _name(node.args[2]) if len(node.args) > 2 else None
        groups = node.args[6] if len(node.args) > 6 else 1
        taken = self._of(node.args[0])
        if weight is None or (len(node.args) > 2 and node.args[2] is not None and bias is None):
            return False
        if groups == 1:
            self._use(taken, weight)
            self._make(node, weight, bias, axis=1)
            return True
        if taken is None or not groups == _tensor(self._module, weight).shape[0] == self._width(taken):
            return False
        group = self._groups[taken.group]
        group.slots += [(each, 0) for each in (weight, bias) if each is not None]
        group.depthwise.append(node)
        self._channels[node] = taken
        return True

    def _linear(self, node: fx.Node) -> bool:
        weight = _name(node.args[1])
        bias = _name(node.args[2]) if len(node.args) > 2 and node.args[2] is not None else None
        taken = self._of(node.args[0])
        if weight is None or (len(node.args) > 2 and node.args[2] is not None and bias is None):
            return False
        if taken is not None and taken.axis != _dimensions(node.args[0]) - 1:
            return False
        self._use(taken, weight)
        self._make(node, weight, bias, axis=_dimensions(node) - 1)
        return True

    def _normalization(self, node: fx.Node) -> bool:
        taken = self._of(node.args[0])
        names = [_name(each) for each in node.args[NORMALIZED : NORMALIZED + 4]]
        if taken is None or taken.axis != 1 or None in names:
            return False
        group = self._groups[taken.group]
        group.slots += [(name, 0) for name in names if name is not None]
        group.scales += [name for name in names[:1] if name is not None]
        self._channels[node] = taken
        return True

    def _flatten(self, node: fx.Node) -> bool:
        taken, shape = self._of(node.args[0]), _shape(node.args[0])
        start = node.args[1] if len(node.args) > 1 else 0
        if taken is None or start != 1 or taken.axis != 1 or any(size != 1 for size in shape[2:]):
            return False
        self._channels[node] = taken
        return True

    def _make(self, node: fx.Node, weight: str, bias: str | None, *, axis: int) -> None:
        width = _tensor(self._module, weight).shape[0]
        slots = [(each, 0) for each in (weight, bias) if each is not None]
        self._groups.append(ChannelGroup(width, slots, [weight]))
        self._parents.append(len(self._parents))
        self._channels[node] = Channels(len(self._groups) - 1, axis)

    def _use(self, taken: Channels | None, weight: str) -> None:
        if taken is not None:
            self._groups[taken.group].slots.append((weight, 1))

    def _block(self, node: fx.Node) -> None:
        for each in node.all_input_nodes:
            if (found := self._of(each)) is not None:
                self._groups[found.group].blocked = True

    def _of(self, node: Any) -> Channels | None:
        return self._channels.get(node) if isinstance(node, fx.Node) else None

    def _width(self, channels: Channels) -> int:
        return self._groups[channels.group].width

    def _root(self, number: int) -> int:
        while self._parents[number] != number:
            number = self._parents[number]
        return number


def _importance(module: fx.GraphModule, group: ChannelGroup) -> torch.Tensor:
    """Return the norm of each channel's weights, times the scales of its normalizations."""
    found = torch.zeros(group.width)
    for name in group.producers:
        norms = _tensor(module, name).detach().flatten(1).norm(dim=1)
        found += norms / norms.mean().clamp_min(1e-12)
    for name in group.scales:
        scale = _tensor(module, name).detach().abs()
        found *= scale / scale.mean().clamp_min(1e-12)
    return found


def _operator(node: fx.Node) -> str:
    """Return the name of an operator without its namespace and overload."""
    parts = str(node.target).split(".")
    return parts[1] if parts[0] == "aten" and len(parts) > 1 else str(node.target)


def _name(node: Any) -> str | None:
    return str(node.target) if isinstance(node, fx.Node) and node.op == "get_attr" else None


def _shape(node: Any) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape) if isinstance(node, fx.Node) and "val" in node.meta else ()


def _dimensions(node: Any) -> int:
    return len(_shape(node))


def _tensor(module: nn.Module, name: str) -> torch.Tensor:
    owner, _, last = name.rpartition(".")
    found: torch.Tensor = getattr(module.get_submodule(owner), last)
    return found


def _replace(module: nn.Module, name: str, value: torch.Tensor) -> None:
    owner, _, last = name.rpartition(".")
    holder = module.get_submodule(owner)
    setattr(holder, last, nn.Parameter(value) if last in holder._parameters else value)
