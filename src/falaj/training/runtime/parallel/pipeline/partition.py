"""Partition of a model into pipeline stages: balanced by parameters, or as the user specifies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import nn

from falaj.training.runtime.parallel.pipeline.forward_graph import (
    ForwardGraph,
    cannot_partition,
    tensors_used,
    trace_forward,
)


class Partition(NamedTuple):
    """A forward graph, and the range of its nodes for each stage."""

    graph: ForwardGraph
    places: list[range]


def partition_model(model: nn.Module, *, count: int, cuts: Sequence[str] | None) -> Partition:
    """Partition `model` into `count` stages; `cuts` names the first layers of the later ones, if given."""
    graph = trace_forward(model)
    uses = tensor_uses(model, graph)
    ties = tied(model, uses)
    if cuts is None:
        starts = balanced_starts(weights(graph, uses), allowed_starts(graph, uses, ties), count=count)
        if starts is None:
            raise too_few_layers(graph, uses, ties, count=count)
    else:
        starts = given_starts(graph, cuts, count=count)
        across = [name for start in starts for name, (first, last) in ties.items() if first < start <= last]
        if across:
            raise tied_across(across[0])
    places = [range(start, end) for start, end in pairwise([0, *starts, len(graph.training)])]
    require_trainable_stages(model, graph, places)
    return Partition(graph, places)


TensorUses = list[tuple[str, int, int, int]]
"""Each used parameter or buffer: its name, the first and the last node, and its number of elements."""


def tensor_uses(model: nn.Module, graph: ForwardGraph) -> TensorUses:
    names = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    found: dict[int, tuple[str, int, int, int]] = {}
    for place, node in enumerate(graph.training):
        for tensor in tensors_used(model, node):
            if id(tensor) not in names:  # not registered: every process has it
                continue
            name, first, _, size = found.get(id(tensor), (names[id(tensor)], place, place, tensor.numel()))
            found[id(tensor)] = name, first, place, size
    return list(found.values())


def tied(model: nn.Module, uses: TensorUses) -> dict[str, tuple[int, int]]:
    """Return the tensors that are used at several nodes, which must be in one stage."""
    return {name: (first, last) for name, first, last, _ in uses if first != last}


def weights(graph: ForwardGraph, uses: TensorUses) -> list[int]:
    """Return the number of elements that each node adds."""
    found = [0] * len(graph.training)
    for _, first, _, size in uses:
        found[first] += size
    return found


def allowed_starts(graph: ForwardGraph, uses: TensorUses, ties: dict[str, tuple[int, int]]) -> list[int]:
    """Return layers with parameters that a stage may begin with, not between two uses of the same tensor."""
    firsts = {first for _, first, _, _ in uses}
    return [
        place
        for place in range(1, len(graph.training))
        if place in firsts and graph.layer(place) and not any(a < place <= b for a, b in ties.values())
    ]


def balanced_starts(sizes: Sequence[int], starts: Sequence[int], *, count: int) -> list[int] | None:
    """Return the `starts` that minimize the largest of `count` stages; None if there are too few."""
    sums = [0, *accumulate(sizes)]
    edges = [0, *starts, len(sizes)]
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for stage in range(count):
        reached: dict[int, tuple[int, list[int]]] = {}
        for end in edges[1:] if stage < count - 1 else edges[-1:]:
            options = [
                (max(largest, sums[end] - sums[start]), [*cut, end])
                for start, (largest, cut) in best.items()
                if start < end and sums[end] > sums[start]
            ]
            if options:
                reached[end] = min(options)
        best = reached
    return best[len(sizes)][1][:-1] if len(sizes) in best else None


def given_starts(graph: ForwardGraph, cuts: Sequence[str], *, count: int) -> list[int]:
    names = [graph.layer(place) for place in range(len(graph.training))]
    layers = [name for name in names if name]
    starts = [_first(names, cut) for cut in cuts]
    if len(cuts) != count - 1 or 0 in starts or starts != sorted(set(starts)):
        allowed = f"{count - 1} first layers of later stages, in order, out of {', '.join(layers)}"
        raise cannot_partition(str(list(cuts)), where="pipeline_cuts", allowed=allowed, fix="leave it out")
    return starts


def _first(names: Sequence[str | None], cut: str) -> int:
    """Return the node of layer `cut`, or of the first layer inside it; 0 if there is none."""
    inside = f"{cut}."
    found = (place for place, name in enumerate(names) if name and (name == cut or name.startswith(inside)))
    return next(found, 0)


def require_trainable_stages(model: nn.Module, graph: ForwardGraph, stages: Sequence[range]) -> None:
    for number, stage in enumerate(stages):
        tensors = [t for place in stage for t in tensors_used(model, graph.training[place])]
        if not any(tensor.requires_grad for tensor in tensors):
            names = ", ".join(name for place in stage if (name := graph.layer(place)))
            raise cannot_partition(
                f"stage {number} ({names}) has nothing to train",
                allowed="a parameter with requires_grad=True in every stage",
                fix="pipeline_cuts=[…], the first layers of the later stages",
            )


def too_few_layers(
    graph: ForwardGraph, uses: TensorUses, ties: dict[str, tuple[int, int]], *, count: int
) -> Exception:
    possible = allowed_starts(graph, uses, {})
    if ties and len(possible) >= count - 1:
        return tied_across(max(ties, key=lambda name: ties[name][1] - ties[name][0]))
    holding = sorted({first for _, first, _, _ in uses})
    names = ", ".join(graph.layer(place) or "…" for place in holding)
    return cannot_partition(
        f"{len(holding)} layers with parameters ({names})", allowed=f"at least {count}, one a stage"
    )


def tied_across(name: str) -> Exception:
    return cannot_partition(
        f"{name}, which is used in more than one stage",
        allowed="parameters that are used in one stage only",
        fix="untie it, or use fsdp, which takes shared parameters",
    )
