"""A checkpoint store behind the agent's socket. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from falaj.training.runtime.checkpointing.storage.store import Bytes, Retention, SaveId


class AgentConnection(Protocol):
    """The client side of a connection to the agent."""

    def call(self, name: str, body: Sequence[Bytes] = (), **values: Any) -> tuple[Any, bytearray]: ...
    def close(self) -> None: ...


class RemoteCheckpoints:
    """A store at the other end of a connection; each process that saves has its own."""

    def __init__(self, caller: AgentConnection, *, is_shared: bool) -> None:
        """`is_shared`: the connection belongs to the caller and is left open."""
        self._caller, self._is_shared = caller, is_shared

    def steps(self) -> list[int]:
        return [int(step) for step in self._caller.call("checkpoint_steps")[0]]

    def save_part(self, save_id: SaveId, number: int, pieces: Sequence[Bytes]) -> None:
        self._caller.call("save_part", pieces, step=save_id.step, save=save_id.save, number=number)

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
