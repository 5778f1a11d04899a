"""A checkpoint store behind the agent's socket. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from falaj.training.runtime.checkpointing.storage import direct
from falaj.training.runtime.checkpointing.storage.store import Bytes, Retention, SaveId
from falaj.training.runtime.errors import CheckpointFailed


class AgentConnection(Protocol):
    """The client side of a connection to the agent."""

    def call(self, name: str, body: Sequence[Bytes] = (), **values: Any) -> tuple[Any, bytearray]: ...
    def close(self) -> None: ...


class RemoteCheckpoints:
    """A store at the other end of a connection; each process that saves has its own."""

    def __init__(self, caller: AgentConnection, *, is_shared: bool, is_remote: bool = False) -> None:
        """`is_shared`: the connection belongs to the caller and is left open.

        `is_remote`: the platform is on another machine, and parts may go straight to its object store.
        """
        self._caller, self._is_shared = caller, is_shared
        self._is_store_open = is_remote and direct.can_seal()

    def steps(self) -> list[int]:
        return [int(step) for step in self._caller.call("checkpoint_steps")[0]]

    def save_part(self, save_id: SaveId, number: int, pieces: Sequence[Bytes]) -> None:
        named = {"step": save_id.step, "save": save_id.save, "number": number}
        if not self._save_directly(pieces, named):
            self._caller.call("save_part", pieces, **named)

    def _save_directly(self, pieces: Sequence[Bytes], named: Mapping[str, Any]) -> bool:
        """Upload a part to the object store, if the platform hands out an address; return whether it has arrived."""
        size = sum(memoryview(piece).nbytes for piece in pieces)
        if not self._is_store_open or not direct.SMALLEST_BYTES <= size <= direct.LARGEST_BYTES:
            return False
        grant, _ = self._caller.call("grant_part", size=size, **named)
        if grant is None:
            self._is_store_open = False
            return False
        try:
            sha256 = direct.upload(pieces, grant)
            self._caller.call("confirm_part", blob=grant["blob"], sha256=sha256, **named)
        except (direct.StoreFailed, CheckpointFailed) as error:
            self._is_store_open = isinstance(
                error, CheckpointFailed
            )  # else it would be tried in vain each time
            print(f"falaj: a part goes through the platform: {error}", file=sys.stderr, flush=True)
            return False
        return True

    def commit(self, save_id: SaveId, sizes: Sequence[int], manifest: bytes, retention: Retention) -> None:
        best = {} if retention.best is None else {"best": retention.best}
        named = {"step": save_id.step, "save": save_id.save, "sizes": list(sizes), "keep": retention.count}
        self._caller.call("commit_checkpoint", [manifest], **named, **best)

    def load_manifest(self, step: int) -> bytes:
        return bytes(self._caller.call("load_manifest", step=step)[1])

    def load_part(self, step: int, number: int, *, offset: int, length: int) -> bytearray:
        return self._caller.call("load_part", step=step, number=number, offset=offset, length=length)[1]

    def sweep(self) -> None:
        """Do nothing: the platform removes uncommitted parts itself."""

    def close(self) -> None:
        if not self._is_shared:
            self._caller.close()
