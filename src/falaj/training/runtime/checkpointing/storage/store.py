"""The checkpoint store of a run: a folder, or the agent. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Bytes: TypeAlias = bytes | memoryview

MAX_PARTS = 4096
MAX_KEPT = 100


@dataclass(frozen=True)
class SaveId:
    """One attempt to save a step, so that parts of another attempt are never mixed in."""

    step: int
    save: str
    """32 hexadecimal digits drawn by rank 0."""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: the newest `count`, and that of the best step."""

    count: int = 3
    best: int | None = None

    def gone(self, steps: Sequence[int], *, newest: int) -> list[int]:
        """Return the steps to delete once `newest` is stored; later ones belong to a run that was started again."""
        older = sorted((step for step in steps if step < newest), reverse=True)
        surplus = [step for step in older[self.count - 1 :] if step != self.best]
        return [*surplus, *(step for step in steps if step > newest)]


class CheckpointStore(Protocol):
    """A commit turns parts into a checkpoint atomically. A store is used by one thread at a time."""

    def steps(self) -> list[int]:
        """Return the steps with a checkpoint, newest first."""

    def save_part(self, save_id: SaveId, number: int, pieces: Sequence[Bytes]) -> None:
        """Store a part durably. It is not visible before the commit."""

    def commit(self, save_id: SaveId, sizes: Sequence[int], manifest: bytes, retention: Retention) -> None:
        """Make the parts, with these `sizes`, and `manifest` the checkpoint of the step."""

    def load_manifest(self, step: int) -> bytes:
        """Return the stored bytes, which the run verifies. Raise CheckpointDamaged if they cannot be read."""

    def load_part(self, step: int, number: int, *, offset: int, length: int) -> bytearray:
        """Return up to `length` bytes of a part, which the run verifies."""

    def sweep(self) -> None:
        """Remove parts of uncommitted saves. No save may be in progress."""

    def close(self) -> None: ...
