"""Write the assigned tensors of a process as one part; rank 0 adds the manifest and commits."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from falaj.training.runtime.checkpointing.restore import TensorInfo
from falaj.training.runtime.checkpointing.storage.arena import tensor_memory
from falaj.training.runtime.checkpointing.storage.manifest import Manifest, encode_manifest
from falaj.training.runtime.checkpointing.storage.parts import PartSummary, TensorChunk, encode_part
from falaj.training.runtime.checkpointing.storage.store import MAX_PARTS, CheckpointStore, Retention, SaveId
from falaj.training.runtime.errors import CheckpointFailed


@dataclass(frozen=True)
class PartTicket:
    """The save and the part number that rank 0 assigns to a process."""

    save_id: SaveId
    number: int


class PartWriter(StorageWriter):
    """Writes the parts and the manifest of one checkpoint to a store."""

    def __init__(
        self, store: CheckpointStore, *, step: int, run: Mapping[str, Any], retention: Retention
    ) -> None:
        self._store, self._run, self._retention = store, run, retention
        self._save_id = SaveId(step, secrets.token_hex(16))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the plans that have something to write, without gaps."""
        number, numbered = 0, []
        for plan in plans:
            numbered.append(
                replace(plan, storage_data=PartTicket(self._save_id, number) if plan.items else None)
            )
            number += bool(plan.items)
        if number > MAX_PARTS:
            raise CheckpointFailed(f"a checkpoint of {number} parts; at most {MAX_PARTS}")
        return numbered

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        if plan.storage_data is not None:
            save_id, number = plan.storage_data.save_id, plan.storage_data.number
            boxes = [_box(item, planner.resolve_data(item)) for item in plan.items]
            data, pieces, facts = encode_part(save_id, number, boxes)
            self._store.save_part(save_id, number, data)
            results.append(WriteResult(MetadataIndex(str(number)), facts.size_bytes, facts))
            results += [
                WriteResult(MetadataIndex(piece.tensor, piece.offsets), piece.size_bytes, piece)
                for piece in pieces
            ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [each.storage_data for result in results for each in result]
        parts = tuple(each for each in written if isinstance(each, PartSummary))
        manifest = Manifest(
            save_id=self._save_id,
            run=self._run,
            numbers=metadata.planner_data["numbers"],
            shared=metadata.planner_data["shared"],
            tensor_infos={
                name: TensorInfo(found.properties.dtype, tuple(found.size))
                for name, found in metadata.state_dict_metadata.items()
                if isinstance(found, TensorStorageMetadata)
            },
            parts=parts,
            pieces=tuple(each for each in written if not isinstance(each, PartSummary)),
        )
        sizes = [part.size_bytes for part in parts]
        self._store.commit(self._save_id, sizes, encode_manifest(manifest), self._retention)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _box(item: WriteItem, tensor: Any) -> TensorChunk:
    if item.tensor_data is None or not isinstance(tensor, Tensor):
        raise TypeError(f"{item.index.fqn} is not a tensor: other values are stored in the manifest")
    chunk = item.tensor_data.chunk
    return TensorChunk(item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes), tensor_memory(tensor))
