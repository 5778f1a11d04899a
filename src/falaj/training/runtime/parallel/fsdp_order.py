"""Detects that FSDP processes did not gather the same blocks in the same order.

If a model selects a block by its samples, shards of different blocks would be combined silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from falaj.training.runtime.errors import InvalidTraining, TrainingError, TrainingFault

TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)
"""torch's message if other processes do not answer."""
PEER_LOST = re.compile("connection (closed|reset)|broken pipe", re.IGNORECASE)
"""torch's message if another process has ended, possibly because of its own timeout a moment before."""


class FsdpOrderCheck:
    """Records the order in which one process gathers `blocks` in a step, and which gradients it has."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], control_group: dist.ProcessGroup
    ) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad and not p.is_meta]
        self._control_group = control_group
        self._seen = 0
        self._gathers: list[str] = []
        names = {id(module): name for name, module in model.named_modules()}
        self._blocks = [(names[id(block)], block) for block in blocks]
        self._hooks: list[RemovableHandle] = []

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Wrap an operation that waits for other processes, and explain timeouts."""
        if not self._hooks:
            self._hooks = [
                block.register_forward_pre_hook(self._note(number, name))
                for number, (name, block) in enumerate(self._blocks)
            ]
        try:
            yield
        except RuntimeError as failure:
            if TIMED_OUT.search(str(failure)):
                raise self._in_vain("the processes timed out while waiting for each other") from failure
            if PEER_LOST.search(str(failure)):
                raise self._in_vain("another process has ended; see its error") from failure
            raise

    def remove_hooks(self) -> None:
        """Remove our hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def compare(self) -> None:
        """Raise InvalidTraining if the processes differ. Collective: called by all after the passes of a step."""
        used = tuple(parameter.grad is not None for parameter in self._parameters)
        own = hash((self._seen, used))
        self._seen = 0
        self._gathers = []
        both = torch.tensor([own, -own])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._control_group)
        largest, smallest = both.tolist()
        if largest != -smallest:
            given = "a model that uses other layers for other samples"
            fault = TrainingFault(
                "parallel", f"fsdp, with {given}", "every layer for every sample", 'parallel="ddp"'
            )
            raise InvalidTraining("the processes did not use the same layers in this step", faults=[fault])

    def _in_vain(self, what: str) -> TrainingError:
        done = f"{len(self._gathers)} blocks gathered in this step"
        if self._gathers:
            done += f", the last one {self._gathers[-1]}"
        given = f"{done}, in process {dist.get_rank()}; another process may report another number"
        fault = TrainingFault("parallel", f"fsdp, {given}", "every layer for every sample", 'parallel="ddp"')
        return TrainingError(f"{what}: did they not use the same layers?", faults=[fault])

    def _note(self, number: int, name: str) -> Any:
        def note(block: nn.Module, _: Any) -> None:
            if block.training and not torch.compiler.is_compiling():
                self._seen = hash((self._seen, number))
                self._gathers.append(name)

        return note
