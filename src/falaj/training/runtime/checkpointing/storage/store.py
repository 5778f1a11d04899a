"""What keeps the checkpoints of a run: a folder, or the agent beside it. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Bytes: TypeAlias = bytes | memoryview

MAX_PARTS = 4096
MAX_KEPT = 100


@dataclass(frozen=True)
class SaveId:
    """One attempt to save a step; what was left of another attempt is never taken for a part of this one."""

    step: int
    save: str
    """Drawn by the leading process: 32 hexadecimal digits."""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest `count`, and that of the step which was evaluated best."""

    count: int = 3
    best: int | None = None

    def gone(self, steps: Sequence[int], *, newest: int) -> list[int]:
        """Those of `steps` that go once `newest` is kept; later ones are of a run that was begun anew."""
        older = sorted((step for step in steps if step < newest), reverse=True)
        surplus = [step for step in older[self.count - 1 :] if step != self.best]
        return [*surplus, *(step for step in steps if step > newest)]


class CheckpointStore(Protocol):
    """Parts become a checkpoint when they are committed, all at once. A store is used by one thread at a time."""

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, newest first."""

    def save_part(self, save_id: SaveId, number: int, pieces: Sequence[Bytes]) -> None:
        """Keep these bytes, durable on return. Nobody sees them before the commit."""

    def commit(self, save_id: SaveId, sizes: Sequence[int], manifest: bytes, retention: Retention) -> None:
        """Make the parts, as many and as long as `sizes` says, and `manifest` the checkpoint of the step."""

    def load_manifest(self, step: int) -> bytes:
        """The bytes as they lie there; the run verifies them. CheckpointDamaged if they cannot be read."""

    def load_part(self, step: int, number: int, *, offset: int, length: int) -> bytearray:
        """So many bytes of a part, or fewer where it ends; the run verifies them."""

    def sweep(self) -> None:
        """Remove what saves that were never committed have left. Nobody may be saving."""

    def close(self) -> None: ...
