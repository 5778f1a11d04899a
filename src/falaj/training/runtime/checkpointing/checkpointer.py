"""Save checkpoints in the background, one at a time, and load the newest valid one."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from falaj.training.runtime.checkpointing.state import CheckpointState, local_tensor
from falaj.training.runtime.checkpointing.storage.arena import StagedCopy, StagingArena, byte_sizes
from falaj.training.runtime.checkpointing.storage.manifest import Manifest, decode_manifest
from falaj.training.runtime.checkpointing.storage.planners import (
    ScratchPlanner,
    StagedPlanner,
    WriteAssignment,
)
from falaj.training.runtime.checkpointing.storage.reader import ChunkReader
from falaj.training.runtime.checkpointing.storage.staging import Staging
from falaj.training.runtime.checkpointing.storage.store import CheckpointStore, Retention
from falaj.training.runtime.checkpointing.storage.writer import PartWriter
from falaj.training.runtime.errors import CheckpointDamaged, InvalidTraining, TrainingError
from falaj.training.runtime.parallel.process_group import ProcessGroup


@dataclass(frozen=True)
class PendingCheckpoint:
    """A checkpoint being saved. The state may change once `staging` is over; it is stored once `written` is done."""

    step: int
    staging: Staging
    written: Future[None]


class Checkpointer:
    """The checkpoints of a run. All processes make the same calls in the same order."""

    def __init__(self, store: CheckpointStore, world: ProcessGroup) -> None:
        self._store, self._world = store, world
        self._assignment = WriteAssignment()
        self._arena = StagingArena(pinned=world.device.type == "cuda")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._ready: Future[None] | None = None
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        if world.is_leader:
            store.sweep()

    def reserve(self, state: CheckpointState) -> None:
        """Allocate staging memory in the background: pinning a gigabyte takes most of a second."""
        sizes = byte_sizes([local_tensor(each) for each in state.tensors.values()])
        self._ready = self._thread.submit(self._arena.reserve, sizes)

    def save(
        self, state: CheckpointState, *, step: int, run: Mapping[str, Any], retention: Retention
    ) -> PendingCheckpoint:
        """Start a checkpoint. `run` and `retention` are those of rank 0. The previous checkpoint must be finished."""
        if self._ready is not None:
            self._ready.exception()  # `lay_out` raises if there was no memory
            self._ready = None
        offered = self._assignment.offer(state)
        staged: dict[MetadataIndex, Tensor] = {}
        failure: BaseException | None = None
        try:
            copies = self._arena.lay_out([local_tensor(state.tensors[item.index.fqn]) for item in offered])
            staged = {item.index: copy.place for item, copy in zip(offered, copies, strict=True)}
            staging = self._stage(offered, copies, state)
        except (RuntimeError, MemoryError) as error:  # out of memory: the other processes must be told
            failure, staging = error, Staging((), (), torch.device("cpu"))
        planner = StagedPlanner(
            self._assignment,
            offered,
            staged,
            numbers=state.numbers,
            shared=state.shared,
            failure=failure,
        )
        writer = PartWriter(self._store, step=step, run=run, retention=retention)
        return PendingCheckpoint(step, staging, self._thread.submit(self._write, staging, planner, writer))

    def load(
        self,
        choose: Callable[[Manifest], Mapping[str, Tensor | None]],
        *,
        notify: Callable[[str], None],
    ) -> tuple[Manifest, dict[str, Tensor]] | None:
        """Return the newest valid checkpoint and the tensors that this process needs, as selected by `choose`.

        None if there is no checkpoint; damaged ones are skipped and reported.
        """
        steps: list[int] = self._shared(self._store.steps() if self._world.is_leader else None)
        for step in steps:
            manifest = self._manifest(step, notify)
            if manifest is None:
                continue
            planner = ScratchPlanner(choose(manifest), manifest.shared)
            try:
                reader = ChunkReader(self._store, manifest)
                _without_pickle(load, {}, storage_reader=reader, planner=planner, group=self._group)
            except (CheckpointDamaged, LookupError, TypeError, ValueError) as damage:
                reason = damage.message if isinstance(damage, CheckpointDamaged) else f"{damage!r}"
                notify(f"skipped the checkpoint of step {step}: {reason}")
                continue
            return manifest, planner.found
        if steps:
            raise CheckpointDamaged(f"no checkpoint is valid (steps {', '.join(map(str, steps))})")
        return None

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes."""
        if self._group is None:
            return [value]
        gathered = [None] * self._world.size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def close(self) -> None:
        """Wait for the pending checkpoint, and close the store."""
        self._thread.shutdown()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        self._store.close()

    def _stage(
        self, offered: Sequence[WriteItem], copies: Sequence[StagedCopy], state: CheckpointState
    ) -> Staging:
        pairs = list(zip(offered, copies, strict=True))
        now = [copy for item, copy in pairs if item.index.fqn not in state.updated]
        later = [copy for item, copy in pairs if item.index.fqn in state.updated]
        return Staging(now, later, self._world.device)

    def _write(self, staging: Staging, planner: StagedPlanner, writer: PartWriter) -> None:
        try:
            staging.finish()
        except Exception as error:  # the other processes wait for this plan
            planner.fail(error)
        try:
            _without_pickle(save, {}, storage_writer=writer, planner=planner, group=self._group)
        except BaseException:
            self._assignment.forget()  # the assignment of writes is uncertain
            raise

    def _manifest(self, step: int, notify: Callable[[str], None]) -> Manifest | None:
        """Return the manifest of `step` as read by rank 0; None if it is damaged."""
        data = None
        if self._world.is_leader:
            try:
                data = self._store.load_manifest(step)
                decode_manifest(data, step=step)
            except CheckpointDamaged as damage:
                data = None
                notify(f"skipped the checkpoint of step {step}: {damage.message}")
        shared = self._world.broadcast_bytes(None if data is None else bytearray(data))
        return None if shared is None else decode_manifest(bytes(shared), step=step)

    def _shared(self, value: Any) -> Any:
        """Return the value of rank 0 in all processes."""
        given = bytearray(json.dumps(value).encode()) if self._world.is_leader else None
        shared = self._world.broadcast_bytes(given)
        return None if shared is None else json.loads(bytes(shared))


def _without_pickle(
    act: Callable[..., Any], state: dict[str, Any], *, group: dist.ProcessGroup | None, **parts: Any
) -> None:
    """Save or load with our planner and storage; raise a failure of any process in all of them."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
    try:
        act(state, process_group=group, no_dist=group is None, **parts)
    except CheckpointException as failed:
        raise _first(failed) from None


def _first(failed: CheckpointException) -> Exception:
    """Return the failure to raise: errors of our own before those that followed from them."""
    causes = [cause for cause, _ in failed.failures.values()]
    known = [cause for cause in causes if isinstance(cause, TrainingError)]
    for cause in [*(each for each in known if isinstance(each, InvalidTraining)), *known, *causes]:
        if isinstance(cause, Exception):
            return cause
    return RuntimeError(str(failed))
