"""Makes uploaded parts a checkpoint of a job, and lets go of those that are not kept any longer."""

from __future__ import annotations

from falaj.errors import Conflict
from falaj.governance import objects
from falaj.governance.operations.call import Call
from falaj.records.training.jobs import Checkpoint, CheckpointPart, JobState
from falaj.training import store
from falaj.training.dependencies import BlobSource
from falaj.training.runtime.checkpointing.storage.store import Retention


def keep_checkpoint(
    call: Call, blobs: BlobSource, *, attempt: int, step: int, save: str, keep: int, best: int | None
) -> Checkpoint:
    """The checkpoint of `step`, made of what the call refers to, all at once; only the attempt that runs has any."""
    row = store.lock_job(call.tx, call.target.id)
    if row["state"] != JobState.RUNNING or row["attempt"] != attempt:
        raise Conflict(f"attempt {attempt} of job {call.target.id} does not run")
    made = [blobs.facts(call.tx, found.id) for found in (call.object("manifest"), *call.referred["parts"])]
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
    gone = {*Retention(keep, best).gone([each.step for each in earlier], newest=step), step}
    for each in earlier:
        if each.step in gone:
            _let_go(call, each, kept=new)
    store.put_checkpoint(call.tx, new)
    return new


def _let_go(call: Call, old: Checkpoint, *, kept: Checkpoint) -> None:
    """Drop a checkpoint, and its blobs unless the one that is kept has the same: it was sent twice."""
    store.drop_checkpoint(call.tx, old.job, old.step)
    same = {each.blob for each in (kept.manifest, *kept.parts)}
    for part in (old.manifest, *old.parts):
        if part.blob not in same:
            objects.delete(call.tx, part.blob, at=call.now)
