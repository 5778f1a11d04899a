"""Read and verify the chunks that a process needs, in large ranges."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from falaj.training.runtime.checkpointing.storage.manifest import Manifest
from falaj.training.runtime.checkpointing.storage.parts import StoredChunk, verify_head
from falaj.training.runtime.checkpointing.storage.planners import narrow
from falaj.training.runtime.checkpointing.storage.store import CheckpointStore
from falaj.training.runtime.errors import CheckpointDamaged

MAX_RANGE_BYTES = 64 << 20
MAX_GAP_BYTES = 64 << 10
"""Chunks at most this far apart are read together, up to the maximum range; a larger chunk is read alone."""


class ChunkReader(StorageReader):
    """Reads the chunks of one checkpoint from a store."""

    def __init__(self, store: CheckpointStore, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return metadata_of(self._manifest)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._places: dict[Any, StoredChunk] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[StoredChunk, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            wanted[self._places[item.storage_index]].append(item)
        for number in {piece.part for piece in wanted}:
            self._verify_head(number)
        for stretch in read_ranges(sorted(wanted, key=lambda piece: (piece.part, piece.at))):
            data = self._read(stretch)
            for piece in stretch:
                tensor = self._verified(piece, data, start=piece.at - stretch[0].at)
                for item in wanted[piece]:
                    target = planner.resolve_tensor(item)
                    target.copy_(narrow(tensor, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def _read(self, stretch: Sequence[StoredChunk]) -> bytearray:
        first, last = stretch[0], stretch[-1]
        length = last.at + last.size_bytes - first.at
        step = self._manifest.save_id.step
        return self._store.load_part(step, first.part, offset=first.at, length=length)

    def _verify_head(self, number: int) -> None:
        save_id, facts = self._manifest.save_id, self._manifest.parts[number]
        head = self._store.load_part(save_id.step, number, offset=0, length=facts.head_bytes)
        verify_head(memoryview(head), save_id=save_id, number=number, facts=facts)

    def _verified(self, piece: StoredChunk, data: bytearray, *, start: int) -> Tensor:
        kind = self._manifest.tensor_infos[piece.tensor]
        found = memoryview(data)[start : start + piece.size_bytes]
        if len(found) != piece.size_bytes or sha256(found).hexdigest() != piece.sha256:
            raise CheckpointDamaged(
                f"its tensor {piece.tensor} is truncated or altered, in part {piece.part}"
            )
        if not piece.size_bytes:
            return torch.empty(piece.sizes, dtype=kind.dtype)
        count = piece.size_bytes // kind.dtype.itemsize
        return torch.frombuffer(data, dtype=kind.dtype, count=count, offset=start).reshape(piece.sizes)


def metadata_of(manifest: Manifest) -> Metadata:
    """Return the manifest as torch's Metadata. `storage_data` maps each chunk to its place."""
    boxes: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in manifest.tensor_infos}
    for piece in manifest.pieces:
        box = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
        boxes[piece.tensor].append(box)
    known = {
        name: TensorStorageMetadata(TensorProperties(dtype=kind.dtype), torch.Size(kind.shape), boxes[name])
        for name, kind in manifest.tensor_infos.items()
    }
    found = {MetadataIndex(piece.tensor, piece.offsets): piece for piece in manifest.pieces}
    return Metadata(state_dict_metadata=dict(known), storage_data=found)


def read_ranges(pieces: Sequence[StoredChunk]) -> Iterator[list[StoredChunk]]:
    """Yield groups of adjacent chunks of one part, up to the maximum range."""
    stretch: list[StoredChunk] = []
    for piece in pieces:
        if stretch and not _continues(stretch, piece):
            yield stretch
            stretch = []
        stretch.append(piece)
    if stretch:
        yield stretch


def _continues(stretch: Sequence[StoredChunk], piece: StoredChunk) -> bool:
    first, last = stretch[0], stretch[-1]
    gap = piece.at - (last.at + last.size_bytes)
    is_near = piece.part == last.part and gap <= MAX_GAP_BYTES
    return is_near and piece.at + piece.size_bytes - first.at <= MAX_RANGE_BYTES
