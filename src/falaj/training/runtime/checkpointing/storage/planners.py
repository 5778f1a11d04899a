"""torch's checkpoint planners over named tensors, without pickle in the stored bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from falaj.training.runtime.checkpointing.state import CheckpointState, Number
from falaj.training.runtime.errors import CheckpointFailed

Signature = tuple[tuple[str, torch.Size, torch.dtype], ...]


@dataclass
class WriteAssignment:
    """The tensors that this process writes, kept from one save to the next so that it stages no more than those.

    All processes together always offer every tensor: what one gives up is assigned to another.
    """

    _signature: Signature | None = None
    _items: list[WriteItem] = field(default_factory=list)

    def offer(self, state: CheckpointState) -> list[WriteItem]:
        """Return the items to stage and write: those of the last save, or everything if the tensors changed."""
        signature = tuple((name, each.shape, each.dtype) for name, each in state.tensors.items())
        if signature != self._signature:
            self._items = create_default_local_save_plan(state.tensors, True).items
            self._signature = signature
        return self._items

    def take(self, items: list[WriteItem]) -> None:
        """Store the assignment that rank 0 made."""
        self._items = items

    def forget(self) -> None:
        """Discard the assignment after a failed save."""
        self._signature = None


class StagedPlanner(DefaultSavePlanner):
    """Offers the staged tensors. Values that are not tensors are sent to rank 0 with the plan."""

    def __init__(
        self,
        assignment: WriteAssignment,
        items: Sequence[WriteItem],
        staged: Mapping[MetadataIndex, Tensor],
        *,
        numbers: Mapping[str, Number],
        shared: Mapping[str, str],
        failure: BaseException | None,
    ) -> None:
        """`failure`: why staging failed, which is raised in all processes."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._assignment, self._offered, self._staged = assignment, list(items), staged
        self._aside = {"numbers": dict(numbers), "shared": dict(shared)}
        self._failure = failure

    def fail(self, failure: BaseException) -> None:
        """Raise `failure` in all processes."""
        self._failure = failure

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        if self._failure is not None:
            raise CheckpointFailed(f"the state could not be copied: {self._failure}")
        return SavePlan(self._offered, planner_data=self._aside)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        aside = [plan.planner_data for plan in all_plans]
        merged = {
            kind: {name: value for each in aside for name, value in each[kind].items()}
            for kind in ("numbers", "shared")
        }
        return [replace(plan, planner_data=None) for plan in plans], replace(metadata, planner_data=merged)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._assignment.take(new_plan.items)
        self.plan = new_plan
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._staged[write_item.index]


class ScratchPlanner(LoadPlanner):
    """Reads into new memory with the layout of the run's tensors, which stay unchanged meanwhile."""

    def __init__(self, layouts: Mapping[str, Tensor | None], stored_as: Mapping[str, str]) -> None:
        """`stored_as` maps names to the names under which the tensors are stored."""
        self._layouts, self._stored_as = layouts, stored_as
        self.found: dict[str, Tensor] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if metadata is not None:
            self._known = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, layout in self._layouts.items():
            stored = self._stored_as.get(name, name)
            known = self._known[stored]
            for box in _boxes(known.size if layout is None else layout):  # type: ignore[union-attr]
                self.found[name] = torch.empty(box.sizes, dtype=known.properties.dtype)  # type: ignore[union-attr]
                wanted = create_read_items_for_chunk_list(stored, known, [box])  # type: ignore[arg-type]
                items += [replace(each, dest_index=MetadataIndex(name, box.offsets)) for each in wanted]
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise TypeError(
            f"{read_item.dest_index.fqn} is not a tensor: other values are stored in the manifest"
        )

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return narrow(self.found[read_item.dest_index.fqn], read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def narrow(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return a slice of `tensor` that shares its memory."""
    for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _boxes(layout: torch.Size | Tensor) -> list[ChunkStorageMetadata]:
    """Return the chunks of a whole tensor that this process holds under `layout`."""
    if isinstance(layout, DTensor):
        if layout.device_mesh.get_coordinate() is None:
            return []
        found: list[ChunkStorageMetadata] = layout.__create_chunk_list__()  # type: ignore[no-untyped-call]
        return found
    shape = layout.shape if isinstance(layout, Tensor) else layout
    return [ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))]
