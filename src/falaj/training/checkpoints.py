"""Commits uploaded parts as a checkpoint of a job, and deletes the checkpoints that are no longer retained."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.errors import Conflict
from falaj.governance import objects
from falaj.governance.operations.call import Call
from falaj.records.governance.objects import StoredObject
from falaj.records.training.jobs import Checkpoint, CheckpointPart
from falaj.training import store
from falaj.training.dependencies import BlobSource
from falaj.training.runtime.checkpointing.storage.store import Retention


def commit_checkpoint(
    call: Call,
    blobs: BlobSource,
    uploads: Sequence[StoredObject],
    *,
    attempt: int,
    step: int,
    save: str,
    retention: Retention,
) -> Checkpoint:
    """Commit `uploads`, a manifest followed by parts, as the checkpoint of `step`; Conflict unless `attempt` runs."""
    row = store.lock_job(call.tx, call.target.id)
    if not row.has_attempt or row.attempt != attempt:
        raise Conflict(f"attempt {attempt} of job {call.target.id} does not run")
    made = [blobs.facts(call.tx, found.id) for found in uploads]
    for blob in made:
        blobs.keep(call.tx, blob, now=call.now)
    manifest, *parts = (CheckpointPart(blob=blob.id, size_bytes=blob.size_bytes) for blob in made)
    new = Checkpoint(
        job=call.target.id,
        step=step,
        save=save,
        manifest=manifest,
        parts=tuple(parts),
        size_bytes=sum(blob.size_bytes for blob in made),
    )
    earlier = store.checkpoints_of(call.tx, new.job)
    gone = {*retention.gone([each.step for each in earlier], newest=step), step}
    for each in earlier:
        if each.step in gone:
            _delete(call, each, kept=new)
    store.put_checkpoint(call.tx, new)
    return new


def _delete(call: Call, old: Checkpoint, *, kept: Checkpoint) -> None:
    """Delete a checkpoint, and those of its blobs that `kept` does not share: a commit may be sent twice."""
    store.drop_checkpoint(call.tx, old.job, old.step)
    same = {each.blob for each in (kept.manifest, *kept.parts)}
    for part in (old.manifest, *old.parts):
        if part.blob not in same:
            objects.delete(call.tx, part.blob, at=call.now)
