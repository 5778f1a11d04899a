"""Checkpoints in a folder: step-…/ with part-00000, part-00001, … and manifest.json. Standard library only.

Parts are written into a hidden folder that the commit renames, so that a checkpoint is complete or absent.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from falaj.training.runtime.checkpointing.storage.store import Bytes, Retention, SaveId
from falaj.training.runtime.errors import CheckpointDamaged, CheckpointFailed, TrainingFault

MANIFEST = "manifest.json"


class CheckpointFolder:
    """A store for processes that share a folder; each writes its own parts, and rank 0 commits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def steps(self) -> list[int]:
        named = (path.name.removeprefix("step-") for path in self._folder.glob("step-*"))
        return sorted((int(step) for step in named if step.isdigit()), reverse=True)

    def save_part(self, save_id: SaveId, number: int, pieces: Sequence[Bytes]) -> None:
        draft = self._draft(save_id)
        _make_folder(draft)
        _write(draft / part_name(number), pieces)

    def commit(self, save_id: SaveId, sizes: Sequence[int], manifest: bytes, retention: Retention) -> None:
        draft = self._draft(save_id)
        _make_folder(draft)  # a checkpoint may have no parts
        _require(draft, sizes)
        _write(draft / MANIFEST, [manifest])
        sync_folder(draft)
        self._hide(save_id.step)  # a damaged one of this step, after a resume from an earlier step
        draft.rename(self._path(save_id.step))
        sync_folder(self._folder)
        sync_folder(self._folder.parent)  # another process may have created the folder, and be gone
        for step in retention.gone(self.steps(), newest=save_id.step):
            self._hide(step)
        self.sweep()

    def load_manifest(self, step: int) -> bytes:
        try:
            return (self._path(step) / MANIFEST).read_bytes()
        except OSError as error:
            raise CheckpointDamaged(f"its manifest cannot be read: {error.strerror}") from error

    def load_part(self, step: int, number: int, *, offset: int, length: int) -> bytearray:
        try:
            with (self._path(step) / part_name(number)).open("rb") as file:
                there = max(0, min(length, os.fstat(file.fileno()).st_size - offset))
                data = bytearray(there)
                file.seek(offset)
                file.readinto(data)
        except OSError as error:
            raise CheckpointDamaged(f"its part {number} cannot be read: {error.strerror}") from error
        return data

    def sweep(self) -> None:
        for left in self._folder.glob(".step-*"):
            shutil.rmtree(left, ignore_errors=True)

    def close(self) -> None:
        pass

    def _hide(self, step: int) -> None:
        """Remove a checkpoint atomically; its bytes are deleted by the next sweep."""
        path = self._path(step)
        if path.exists():
            path.rename(self._folder / f".{path.name}.gone-{os.urandom(4).hex()}")

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:010}"

    def _draft(self, save_id: SaveId) -> Path:
        return self._folder / f".step-{save_id.step:010}.{save_id.save}"


def part_name(number: int) -> str:
    return f"part-{number:05}"


def sync_folder(folder: Path) -> None:
    """Make creations, renames and removals in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make_folder(folder: Path) -> None:
    """Create `folder` and the missing ones above it durably: else a power cut takes all checkpoints in it."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def _write(path: Path, pieces: Sequence[Bytes]) -> None:
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _require(draft: Path, sizes: Sequence[int]) -> None:
    """Require that all parts are present: the processes may not share the folder."""
    for number, size in enumerate(sizes):
        path = draft / part_name(number)
        found = path.stat().st_size if path.exists() else None
        if found != size:
            given = "not there" if found is None else f"{found} bytes"
            fault = TrainingFault(
                str(path), given, f"{size} bytes", "a run folder on a disk that all processes share"
            )
            raise CheckpointFailed("a part that another process wrote is missing", faults=[fault])
