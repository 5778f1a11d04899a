"""A model that is partitioned over processes: the stage of this one, and the whole model on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from falaj.training.runtime.parallel.dtensors import full_tensor
from falaj.training.runtime.parallel.pipeline.channel import StageChannel
from falaj.training.runtime.parallel.pipeline.partition import Partition
from falaj.training.runtime.parallel.pipeline.stage import (
    extract_stage,
    like,
    named_tensors,
    on_meta_device,
    replace_tensors,
    stage_of_tensors,
)
from falaj.training.runtime.parallel.process_group import ProcessGroup


class PipelinedModel:
    """`part` is a copy of the model with memory for one stage only; the model itself holds meta tensors meanwhile."""

    def __init__(
        self, model: nn.Module, stages: Partition, world: ProcessGroup, group: dist.ProcessGroup
    ) -> None:
        self.group = group
        """The processes that hold the stages of one replica of the model."""
        self._members = dist.get_process_group_ranks(group)
        self._model, self._device = model, world.device
        self._stage_of = stage_of_tensors(model, stages)
        number = self._members.index(world.rank)
        self.later_stages = len(self._members) - 1 - number
        """The number of later stages."""
        self.channel = StageChannel(
            before=self._members[number - 1] if number else None,
            after=self._members[number + 1] if self.later_stages else None,
            device=world.device,
        )
        self.part = extract_stage(model, stages, number, device=world.device)

    def from_last(self, value: Tensor) -> Tensor:
        """Broadcast the last stage's value to all stages."""
        dist.broadcast(value, self._members[-1], group=self.group)
        return value

    @contextmanager
    def full_model(self) -> Iterator[nn.Module]:
        """Provide the model with all its tensors on the device. Collective."""
        self.finish_model(self._device)
        try:
            yield self._model
        finally:
            replace_tensors(self._model, on_meta_device)

    def finish_model(self, device: torch.device) -> None:
        """Gather the tensors of all stages into the model, on `device`. Collective."""
        own = dict(named_tensors(self.part))
        gathered = {name: self._from_home(name, own[name]).to(device) for name in self._stage_of}
        names = {id(tensor): name for name, tensor in named_tensors(self._model)}
        replace_tensors(self._model, lambda tensor: like(tensor, gathered[names[id(tensor)]]))

    def _from_home(self, name: str, own: Tensor) -> Tensor:
        home = self._members[self._stage_of[name]]
        if own.is_meta:
            found = torch.empty_like(own, device=self._device, requires_grad=False)
        else:
            found = full_tensor(own.detach()).contiguous()
        dist.broadcast(found, home, group=self.group)
        return found
