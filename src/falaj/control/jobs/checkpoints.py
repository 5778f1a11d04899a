"""Uploads of checkpoints by the agent of an attempt: parts from many processes, then one commit.

The calls come from user code. Parts are encrypted and staged until the commit; parts without a commit expire.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from falaj.control.authorization import acting
from falaj.control.jobs.storage_limits import StorageLimits
from falaj.control.services import Services
from falaj.errors import Damaged, FalajError, NotFound, TooLarge
from falaj.governance.blobs.direct import StagedUpload, UploadGrant
from falaj.governance.operations.caller import Caller
from falaj.records.names import ObjectId
from falaj.records.training.jobs import Checkpoint, CheckpointPart
from falaj.training.runtime.checkpointing.storage.store import MAX_KEPT, MAX_PARTS, SaveId
from falaj.training.runtime.errors import CheckpointDamaged, CheckpointFailed, InvalidTraining

MOST_UNFINISHED = 2
"""Uncommitted checkpoints of an attempt; there is never more than one, unless a commit was refused."""

SAVE = re.compile(r"[0-9a-f]{32}")


@dataclass
class UnfinishedCheckpoint:
    """A checkpoint without a commit: the uploaded parts, and the sizes of all that were announced."""

    parts: dict[int, ObjectId] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    grants: dict[int, UploadGrant] = field(default_factory=dict)
    """Parts that are being uploaded straight to the store."""

    def beside(self, number: int) -> int:
        """Return the bytes of all parts but that one."""
        return sum(size for each, size in self.sizes.items() if each != number)


class CheckpointUploads:
    """Uploads on behalf of the job's owner, and commits as the controller. A refused upload leaves nothing behind."""

    def __init__(
        self,
        services: Services,
        job: ObjectId,
        attempt: int,
        *,
        workspace: ObjectId,
        owner: Callable[[], Caller],
        service: Caller,
        fence: int,
        limits: StorageLimits,
        zone: Callable[[], str | None] = lambda: None,
        is_store_open: bool = False,
    ) -> None:
        """`is_store_open`: the machines of the attempt may reach the object store."""
        self._is_store_open = is_store_open
        self._services, self._job, self._attempt, self._workspace = services, job, attempt, workspace
        self._owner, self._service, self._fence = owner, service, fence
        self._limits, self._zone = limits, zone
        self._unfinished: dict[SaveId, UnfinishedCheckpoint] = {}
        self._lock = threading.Lock()

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, newest first."""
        return [each.step for each in self._kept()]

    def save_part(self, mark: SaveId, number: int, body: Iterator[bytes], *, size: int) -> None:
        """Upload a part of `size` bytes; TooLarge if that exceeds a limit."""
        require_mark(mark)
        _require("number", number, most=MAX_PARTS - 1)
        what = f"part {number} of the checkpoint of step {mark.step}"
        save = self._announce(mark, number, size, what)
        self._take(mark, number, save, self._limits.watch(body, what=what))

    def grant_part(self, mark: SaveId, number: int, *, size: int) -> UploadGrant | None:
        """Announce a part of `size` bytes that is uploaded to the store itself; none if it is to come through here."""
        require_mark(mark)
        _require("number", number, most=MAX_PARTS - 1)
        _require("size", size)
        if not self._is_store_open:
            return None
        self._owner()  # raises if they may no longer act
        zone = self._services.blobs.gate.zones.named(self._zone()).name
        grant = self._services.jobs.stored.grant_upload(self._workspace, zone=zone)
        if grant is not None:
            what = f"part {number} of the checkpoint of step {mark.step}"
            save = self._announce(mark, number, size, what)
            with self._lock:
                replaced = save.grants.get(number)
                save.grants[number] = grant
            self._discard(replaced)
        return grant

    def confirm_part(self, mark: SaveId, number: int, *, blob: str, sha256: str) -> None:
        """Take a part that was uploaded to the store, if it is what was announced; a repeated call has no effect."""
        require_mark(mark)
        with self._lock:
            save = self._unfinished.get(mark) or UnfinishedCheckpoint()
            if save.parts.get(number) == blob:
                return
            grant = save.grants.get(number)
        if grant is None or grant.ident != blob:
            raise CheckpointFailed(
                f"part {number} of the checkpoint of step {mark.step} has no such upload; send it again"
            )
        staged = StagedUpload(grant, save.sizes[number], sha256)
        try:
            self._take(mark, number, save, staged)
        except (Damaged, NotFound, TooLarge) as error:
            raise CheckpointFailed(f"the store has not what was announced: {error.message}") from error

    def _take(self, mark: SaveId, number: int, save: UnfinishedCheckpoint, body: Iterator[bytes]) -> None:
        """Store a part that was announced."""
        try:
            blob = self._upload(body)
        except BaseException:
            self._withdraw(mark, number, save)
            raise
        with self._lock:
            save.grants.pop(number, None)
            is_wanted = self._unfinished.get(mark) is save
            replaced = (
                {save.parts.get(number)} if is_wanted else {blob}
            )  # its answer was lost, and it was sent again
            save.parts[number] = blob
        self._drop(replaced - {None})
        if not is_wanted:
            raise CheckpointFailed(f"the checkpoint of step {mark.step} was dropped for later ones")

    def commit(
        self,
        mark: SaveId,
        sizes: Sequence[int],
        manifest: Iterator[bytes],
        *,
        size: int,
        keep: int,
        best: int | None,
    ) -> None:
        """Commit parts of these `sizes` and a manifest of `size` bytes as a checkpoint.

        A repeated commit, after an answer that was lost, has no effect.
        """
        require_mark(mark)
        _require("keep", keep, least=1, most=MAX_KEPT)
        if best is not None:
            _require("best", best)
        kept = self._kept()
        if any((each.step, each.save) == (mark.step, mark.save) for each in kept):
            return
        parts = self._arrived(mark, sizes)
        what = f"the manifest of the checkpoint of step {mark.step}"
        self._limits.require(size, beside=sum(sizes), what=what)
        blob = self._upload(self._limits.watch(manifest, what=what))
        try:
            self._keep(mark, blob, parts, keep=keep, best=best)
        except FalajError:
            self._drop({blob})
            raise
        with self._lock:
            self._unfinished.pop(mark, None)
        self._erase(each.blob for old in kept for each in (old.manifest, *old.parts))

    def load_manifest(self, step: int) -> tuple[int, Iterator[bytes]]:
        """Return the size and the bytes of a manifest."""
        part = self._checkpoint(step).manifest
        return self._read(part, offset=0, length=part.size_bytes)

    def load_part(self, step: int, number: int, *, offset: int, length: int) -> tuple[int, Iterator[bytes]]:
        """Return the size and the bytes of what exists of a range of a part."""
        _require("offset", offset)
        _require("length", length)
        parts = self._checkpoint(step).parts
        if not 0 <= number < len(parts):
            raise CheckpointDamaged(f"there is no part {number} of the checkpoint of step {step}")
        return self._read(parts[number], offset=offset, length=length)

    def _read(self, part: CheckpointPart, *, offset: int, length: int) -> tuple[int, Iterator[bytes]]:
        there = max(0, min(length, part.size_bytes - offset))
        if not there:
            return 0, iter(())
        with acting(self._owner(), fence=self._fence):
            return there, self._services.blobs.read(part.blob, offset=offset, length=there)

    def _kept(self) -> tuple[Checkpoint, ...]:
        with acting(self._owner(), fence=self._fence):
            return self._services.jobs.checkpoints(self._job)

    def _checkpoint(self, step: int) -> Checkpoint:
        found = next((each for each in self._kept() if each.step == step), None)
        if found is None:
            raise CheckpointDamaged(f"there is no checkpoint of step {step}")
        return found

    def _announce(self, mark: SaveId, number: int, size: int, what: str) -> UnfinishedCheckpoint:
        """Count a part from now on; drop the oldest uncommitted checkpoints."""
        dropped: set[ObjectId] = set()
        given_up: list[UploadGrant] = []
        with self._lock:
            save = self._unfinished.get(mark) or UnfinishedCheckpoint()
            self._limits.require(size, beside=save.beside(number), what=what)
            save.sizes[number] = size
            self._unfinished[mark] = save
            while len(self._unfinished) > MOST_UNFINISHED:
                oldest = self._unfinished.pop(next(iter(self._unfinished)))
                dropped |= {*oldest.parts.values()}
                given_up += oldest.grants.values()
        for grant in given_up:
            self._discard(grant)
        self._drop(dropped)
        return save

    def _withdraw(self, mark: SaveId, number: int, save: UnfinishedCheckpoint) -> None:
        """Forget a part whose upload failed, and an earlier upload of it, which was to be replaced."""
        with self._lock:
            save.sizes.pop(number, None)
            grant = save.grants.pop(number, None)
            dropped = {save.parts.pop(number, None)} - {None}
            if not save.sizes and self._unfinished.get(mark) is save:
                del self._unfinished[mark]
        self._discard(grant)
        self._drop(dropped)

    def _arrived(self, mark: SaveId, sizes: Sequence[int]) -> tuple[ObjectId, ...]:
        """Return the parts of a checkpoint; InvalidTraining unless their sizes are `sizes`."""
        with self._lock:
            save = self._unfinished.get(mark) or UnfinishedCheckpoint()
            found, there = dict(save.parts), dict(save.sizes)
        if sorted(found) != list(range(len(sizes))):
            arrived = f"{len(found)} of its {len(sizes)} parts have arrived since the agent started"
            raise InvalidTraining(f"the checkpoint of step {mark.step} cannot be committed: {arrived}")
        for number, size in enumerate(sizes):
            if there.get(number) != size:
                raise InvalidTraining(
                    f"part {number} of the checkpoint of step {mark.step} has {there.get(number)} bytes, not {size}"
                )
        return tuple(found[number] for number in range(len(sizes)))

    def _keep(
        self, mark: SaveId, manifest: ObjectId, parts: tuple[ObjectId, ...], *, keep: int, best: int | None
    ) -> None:
        with acting(self._service, fence=self._fence):
            self._services.jobs.save_checkpoint(
                self._job,
                attempt=self._attempt,
                step=mark.step,
                save=mark.save,
                manifest=manifest,
                parts=parts,
                keep=keep,
                best=best,
            )

    def _upload(self, body: Iterator[bytes]) -> ObjectId:
        zone = body.grant.zone if isinstance(body, StagedUpload) else self._zone()
        with acting(self._owner(), fence=self._fence):
            return self._services.blobs.upload(
                body, workspace=self._workspace, sources=(self._job,), zone=zone
            ).id

    def close(self) -> None:
        """Remove what was uploaded to the store and not confirmed; what cannot be removed expires."""
        with self._lock:
            grants = [grant for save in self._unfinished.values() for grant in save.grants.values()]
        for grant in grants:
            self._discard(grant)

    def _discard(self, grant: UploadGrant | None) -> None:
        if grant is not None:
            with suppress(FalajError):
                self._services.jobs.stored.discard_upload(grant)

    def _drop(self, blobs: Iterable[ObjectId | None]) -> None:
        """Delete blobs that will not be committed; those that cannot be deleted expire."""
        for blob in blobs:
            if blob is not None:
                with suppress(FalajError), acting(self._owner(), fence=self._fence):
                    self._services.blobs.delete(blob)
                    self._erase((blob,))

    def _erase(self, blobs: Iterable[ObjectId]) -> None:
        """Remove the bytes of deleted blobs now: until the next sweep they could fill the disk."""
        for blob in blobs:
            with suppress(FalajError):
                self._services.jobs.stored.erase(blob)


def require_mark(mark: SaveId) -> None:
    """Raise ValueError unless `mark` names a checkpoint."""
    _require("step", mark.step)
    if not SAVE.fullmatch(mark.save):
        raise ValueError("`save` must be 32 hexadecimal digits")


def _require(name: str, number: int, *, least: int = 0, most: int = (1 << 62) - 1) -> None:
    if not least <= number <= most:
        raise ValueError(f"`{name}` must be between {least} and {most}, not {number}")
