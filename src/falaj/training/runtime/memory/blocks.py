"""What fsdp gathers: the blocks of a model, each by itself, and what lies outside them."""

from __future__ import annotations

from collections.abc import Set

from torch import nn


def block_bytes(model: nn.Module, *, held: Set[int] | None = None) -> tuple[int, int]:
    """The largest block that fsdp gathers by itself, and what is in no block; of the parameters with the ids in `held`
    only, where a process holds no others: then a block that it has a part of is none."""
    *inside, outside = gathered_together(model, held=held)
    sizes = [sum(p.nbytes for p in block) for block in inside]
    return max(sizes, default=0), sum(p.nbytes for p in outside)


def gathered_together(model: nn.Module, *, held: Set[int] | None = None) -> list[list[nn.Parameter]]:
    """The parameters of each block, and last those of none."""
    from falaj.training.runtime.parallel.strategies import fsdp_blocks

    left = {id(p): p for p in model.parameters() if held is None or id(p) in held}
    own = set(left)
    here = [block for block in fsdp_blocks(model) if all(id(p) in own for p in block.parameters())]
    found = [
        [left.pop(id(p)) for p in block.parameters() if id(p) in left] for block in here
    ]  # the innermost first: each parameter is gathered with the smallest block around it
    return [*found, list(left.values())]


def can_be_sharded(model: nn.Module) -> bool:
    """Whether fsdp takes this model: no parameter that is a single number, one type in a block, no sparse gradients."""
    if any(p.dim() == 0 for p in model.parameters()):
        return False
    if any(isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse for each in model.modules()):
        return False
    together = gathered_together(model)
    return all(len({p.dtype for p in block if p.requires_grad}) <= 1 for block in together)
