"""The tensor-parallel plan: which linear layers are split over a tensor group, and how (column, then row)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from typing import Literal

from torch import nn

from falaj.training.runtime.errors import InvalidTraining, TrainingFault

Cut = Literal["column", "row"]
TensorPlan = Mapping[str, Cut]
"""Names of linear layers, where * matches one part of a name: {"blocks.*.up": "column", "blocks.*.down": "row"}.
"""

ELEMENTWISE_LAYERS = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.ELU,
    nn.LeakyReLU,
    nn.Dropout,
    nn.Identity,
)
"""Layers that treat each feature separately."""


def find_cuts(model: nn.Module, plan: TensorPlan | None, *, size: int) -> dict[str, Cut]:
    """Return the layers of `model` to split: those that `plan` names, or consecutive pairs of linear layers."""
    shared = layers_sharing_parameters(model)
    found = dict(_named(model, plan)) if plan is not None else dict(_pairs(model, shared))
    if not found:
        fault = TrainingFault(
            "tensor_plan",
            "no pair of linear layers in a row was found",
            "names of layers, column or row",
            'tensor_plan={"blocks.*.up": "column", "blocks.*.down": "row"}',
        )
        raise InvalidTraining("the model has nothing to cut", faults=[fault])
    faults = [uneven for name, cut in found.items() if (uneven := _uneven(model, name, cut, size))]
    allowed = "layers that do not share parameters"
    faults += [
        TrainingFault(name, "shares a parameter with another layer", allowed)
        for name in found
        if name in shared
    ]
    if faults:
        raise InvalidTraining(f"layers cannot be cut in {size}", faults=faults)
    return found


def layers_sharing_parameters(model: nn.Module) -> Set[str]:
    """Return layers that share a parameter with another layer, or have several names themselves."""
    holders: dict[int, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(name)
    return {name for names in holders.values() if len(names) > 1 for name in names}


def _named(model: nn.Module, plan: TensorPlan) -> Iterator[tuple[str, Cut]]:
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for pattern, cut in plan.items():
        wanted = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        matching = [name for name in names if wanted.fullmatch(name)]
        if not matching or cut not in ("column", "row"):
            allowed = f"names of linear layers ({', '.join(names[:5])} …), column or row"
            fault = TrainingFault("tensor_plan", f"{pattern}: {cut}", allowed)
            raise InvalidTraining("the tensor plan does not fit the model", faults=[fault])
        yield from ((name, cut) for name in matching)


def _pairs(model: nn.Module, shared: Set[str]) -> Iterator[tuple[str, Cut]]:
    """Yield two linear layers without anything between them that mixes features.

    Only where the order of the layers is known: what a custom forward does cannot be seen here.
    """
    for prefix, module in model.named_modules():
        path = f"{prefix}." if prefix else ""
        pairs: list[tuple[str, str]] = []
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            pairs = [("linear1", "linear2")]
        elif isinstance(module, nn.Sequential):
            pairs = list(_in_sequence(module))
        for first, second in pairs:
            if not {f"{path}{first}", f"{path}{second}"} & shared:
                yield from ((f"{path}{first}", "column"), (f"{path}{second}", "row"))


def _in_sequence(module: nn.Sequential) -> Iterator[tuple[str, str]]:
    before: tuple[str, nn.Linear] | None = None
    for name, layer in module.named_children():
        if isinstance(layer, nn.Linear):
            if before is not None and before[1].out_features == layer.in_features:
                yield before[0], name
                before = None
            else:
                before = name, layer
        elif not isinstance(layer, ELEMENTWISE_LAYERS):
            before = None


def _uneven(model: nn.Module, name: str, cut: Cut, size: int) -> TrainingFault | None:
    layer = model.get_submodule(name)
    width = layer.out_features if cut == "column" else layer.in_features
    if isinstance(width, int) and width % size:
        return TrainingFault(name, f"{width} features", f"a multiple of {size}")
    return None
