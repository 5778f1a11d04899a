"""Notices when processes that share shards did not do the same: what one gathers, the others must give at that moment.

Where a block is chosen by the samples, shards of different blocks would be put together, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from falaj.training.runtime.errors import Fault, InvalidTraining


class ShardOrder:
    """The order in which one process gathers `blocks` in a step, and what of `model` it has gradients for."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], words: dist.ProcessGroup) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad and not p.is_meta]
        self._words = words
        self._seen = 0
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(self._note(number))

    def compare(self) -> None:
        """Refuse a step in which the processes did different things. All call this at once, after the step's passes."""
        used = tuple(parameter.grad is not None for parameter in self._parameters)
        own = hash((self._seen, used))
        self._seen = 0
        both = torch.tensor([own, -own])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._words)
        largest, smallest = both.tolist()
        if largest != -smallest:
            given = "a model that uses other layers for other samples"
            fault = Fault("parallel", f"fsdp, with {given}", "every layer for every sample", 'parallel="ddp"')
            raise InvalidTraining("the processes did not use the same layers in this step", faults=[fault])

    def _note(self, number: int) -> Any:
        def note(block: nn.Module, _: Any) -> None:
            if block.training and not torch.compiler.is_compiling():
                self._seen = hash((self._seen, number))

        return note
