"""The checkpoints of an attempt, as its agent takes them in: parts from many processes, then one commit.

What comes from there is user code's. Parts lie encrypted and staged until the commit; those that never see one expire.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

from falaj.control.behalf import acting
from falaj.control.platform import Rooms
from falaj.errors import FalajError
from falaj.governance.caller import Caller
from falaj.records.names import ObjectId
from falaj.records.training import Checkpoint, CheckpointPart
from falaj.training.runtime.checkpoint.store import MOST_KEPT, MOST_PARTS, Mark
from falaj.training.runtime.errors import CheckpointDamaged, InvalidTraining

MOST_UNFINISHED = 2
"""Saves of an attempt that have parts and no commit yet; there is never more than one, unless a commit was refused."""

SAVE = re.compile(r"[0-9a-f]{32}")


class CheckpointDesk:
    """Uploads for the job's owner, and commits as the platform itself."""

    def __init__(
        self,
        rooms: Rooms,
        job: ObjectId,
        attempt: int,
        *,
        workspace: ObjectId,
        owner: Callable[[], Caller],
        service: Caller,
        fence: int,
    ) -> None:
        self._rooms, self._job, self._attempt, self._workspace = rooms, job, attempt, workspace
        self._owner, self._service, self._fence = owner, service, fence
        self._unfinished: dict[Mark, dict[int, ObjectId]] = {}
        self._lock = threading.Lock()

    def steps(self) -> list[int]:
        return [each.step for each in self._kept()]

    def save_part(self, mark: Mark, number: int, body: Iterator[bytes]) -> None:
        require_mark(mark)
        _require("number", number, most=MOST_PARTS - 1)
        blob = self._upload(body)
        with self._lock:
            parts = self._unfinished.setdefault(mark, {})
            replaced = {parts.get(number)} - {None}  # its answer was lost, and it came again
            parts[number] = blob
            while len(self._unfinished) > MOST_UNFINISHED:
                replaced |= set(self._unfinished.pop(next(iter(self._unfinished))).values())
        self._drop(replaced)

    def commit(
        self, mark: Mark, parts: int, manifest: Iterator[bytes], *, keep: int, best: int | None
    ) -> None:
        """Make `parts` parts a checkpoint. One that was made already, by a call whose answer was lost, is as good."""
        require_mark(mark)
        _require("keep", keep, least=1, most=MOST_KEPT)
        if best is not None:
            _require("best", best)
        if any((each.step, each.save) == (mark.step, mark.save) for each in self._kept()):
            return
        with self._lock:
            found = dict(self._unfinished.get(mark, {}))
        if sorted(found) != list(range(parts)):
            said = f"{len(found)} of its {parts} parts have arrived since the agent started"
            raise InvalidTraining(f"the checkpoint of step {mark.step} cannot be committed: {said}")
        blob = self._upload(manifest)
        ordered = tuple(found[number] for number in range(parts))
        with acting(self._service, fence=self._fence):
            self._rooms.jobs.save_checkpoint(
                self._job,
                attempt=self._attempt,
                step=mark.step,
                save=mark.save,
                manifest=blob,
                parts=ordered,
                keep=keep,
                best=best,
            )
        with self._lock:
            self._unfinished.pop(mark, None)

    def load_manifest(self, step: int) -> tuple[int, Iterator[bytes]]:
        part = self._checkpoint(step).manifest
        return self._read(part, offset=0, length=part.size_bytes)

    def load_part(self, step: int, number: int, *, offset: int, length: int) -> tuple[int, Iterator[bytes]]:
        """The size of what is there of a range, and the bytes."""
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
            return there, self._rooms.blob.read(part.blob, offset=offset, length=there)

    def _kept(self) -> tuple[Checkpoint, ...]:
        with acting(self._owner(), fence=self._fence):
            return self._rooms.jobs.checkpoints(self._job)

    def _checkpoint(self, step: int) -> Checkpoint:
        found = next((each for each in self._kept() if each.step == step), None)
        if found is None:
            raise CheckpointDamaged(f"there is no checkpoint of step {step}")
        return found

    def _upload(self, body: Iterator[bytes]) -> ObjectId:
        with acting(self._owner(), fence=self._fence):
            return self._rooms.blob.upload(body, workspace=self._workspace, sources=(self._job,)).id

    def _drop(self, blobs: set[ObjectId | None]) -> None:
        """Let go of parts that no commit will have; where that is not possible, they expire."""
        for blob in blobs:
            if blob is not None:
                with suppress(FalajError), acting(self._owner(), fence=self._fence):
                    self._rooms.blob.delete(blob)


def require_mark(mark: Mark) -> None:
    _require("step", mark.step)
    if not SAVE.fullmatch(mark.save):
        raise ValueError("a save is named by 32 hexadecimal digits")


def _require(name: str, number: int, *, least: int = 0, most: int = (1 << 62) - 1) -> None:
    if not least <= number <= most:
        raise ValueError(f"{name} is {number}; allowed: {least} to {most}")
