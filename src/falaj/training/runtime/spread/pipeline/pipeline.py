"""A model cut into stages over the processes: the part of this one, and the whole when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from falaj.training.runtime.parallel.process_group import ProcessGroup
from falaj.training.runtime.spread.pipeline.cutting import Stages
from falaj.training.runtime.spread.pipeline.line import Line
from falaj.training.runtime.spread.pipeline.stage import (
    homes_of,
    like,
    named_tensors,
    replace_tensors,
    take_part,
    without_memory,
)
from falaj.training.runtime.spread.tensors import whole


class Pipeline:
    """`part` is a copy of the model that has memory for one stage only; the model itself has none meanwhile."""

    def __init__(
        self, model: nn.Module, stages: Stages, world: ProcessGroup, group: dist.ProcessGroup
    ) -> None:
        self.group = group
        """The processes that hold the stages of one copy of the model."""
        self._members = dist.get_process_group_ranks(group)
        self._model, self._device = model, world.device
        self._homes = homes_of(model, stages)
        number = self._members.index(world.rank)
        self.behind = len(self._members) - 1 - number
        """How many stages come after this one."""
        self.line = Line(
            before=self._members[number - 1] if number else None,
            after=self._members[number + 1] if self.behind else None,
            device=world.device,
        )
        self.part = take_part(model, stages, number, device=world.device)

    def from_last(self, value: Tensor) -> Tensor:
        """What the last stage has, for all of them."""
        dist.broadcast(value, self._members[-1], group=self.group)
        return value

    @contextmanager
    def full_model(self) -> Iterator[nn.Module]:
        """The model with all its tensors, on the device, as long as this lasts. All processes do this at once."""
        self.finish_model(self._device)
        try:
            yield self._model
        finally:
            replace_tensors(self._model, without_memory)

    def finish_model(self, device: torch.device) -> None:
        """Put the tensors of all stages into the model, on `device`. All processes do this at once."""
        own = dict(named_tensors(self.part))
        gathered = {name: self._from_home(name, own[name]).to(device) for name in self._homes}
        names = {id(tensor): name for name, tensor in named_tensors(self._model)}
        replace_tensors(self._model, lambda tensor: like(tensor, gathered[names[id(tensor)]]))

    def _from_home(self, name: str, own: Tensor) -> Tensor:
        home = self._members[self._homes[name]]
        if own.is_meta:
            found = torch.empty_like(own, device=self._device, requires_grad=False)
        else:
            found = whole(own.detach()).contiguous()
        dist.broadcast(found, home, group=self.group)
        return found
