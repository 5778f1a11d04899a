"""The blocks of a model that FSDP gathers one at a time, and their sizes."""

from __future__ import annotations

from collections.abc import Set

from torch import nn


def fsdp_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of a model, which are gathered one at a time: members of lists, innermost first.

    A part that shares parameters with another one is gathered with the rest.
    """
    holders: dict[nn.Parameter, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(id(module))
    found: dict[int, nn.Module] = {}
    for parent in reversed(list(model.modules())):
        if isinstance(parent, nn.ModuleList | nn.Sequential) and parent is not model:
            found |= {id(child): child for child in parent}
    return [part for part in found.values() if is_self_contained(part, holders)]


def is_self_contained(part: nn.Module, holders: dict[nn.Parameter, set[int]]) -> bool:
    within = {id(module) for module in part.modules()}
    parameters = list(part.parameters())
    return bool(parameters) and all(holders[parameter] <= within for parameter in parameters)


def block_bytes(model: nn.Module, *, held: Set[int] | None = None) -> tuple[int, int]:
    """Return the size of the largest block that fsdp gathers at once, and of the parameters outside all blocks.

    Only the parameters with the ids in `held` count, if given; a block that is only partly held is no block.
    """
    *inside, outside = gathered_together(model, held=held)
    sizes = [sum(p.nbytes for p in block) for block in inside]
    return max(sizes, default=0), sum(p.nbytes for p in outside)


def gathered_together(model: nn.Module, *, held: Set[int] | None = None) -> list[list[nn.Parameter]]:
    """Return the parameters of each block, and last those outside all blocks."""
    left = {id(p): p for p in model.parameters() if held is None or id(p) in held}
    own = set(left)
    here = [block for block in fsdp_blocks(model) if all(id(p) in own for p in block.parameters())]
    found = [
        [left.pop(id(p)) for p in block.parameters() if id(p) in left] for block in here
    ]  # the innermost first: each parameter is gathered with the smallest block around it
    return [*found, list(left.values())]


def can_be_sharded(model: nn.Module) -> bool:
    """Return whether fsdp supports this model: no scalar parameters, one dtype per block, no sparse gradients."""
    if any(p.dim() == 0 for p in model.parameters()):
        return False
    if any(isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse for each in model.modules()):
        return False
    together = gathered_together(model)
    return all(len({p.dtype for p in block if p.requires_grad}) <= 1 for block in together)
