"""The port `replicas`: runs model servers that answer on one address together."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from falaj.records.control.replicas import Replica


class ReplicaDriver(Protocol):
    """Runs replicas of the model server behind one address. Its methods are called by one thread and never wait.

    - The address accepts connections from before the first start until `close`, also while no replica runs: a client
      that connects then waits for one.
    - Only ready replicas get new connections, and all of them do. A replica is ready when its models are loaded; one
      that needs long for that gets connections while there is no other, and says itself that it is not ready.
    - A replica that was told to stop soon gets no new connections, answers the requests that it has, and ends. At its
      deadline it is killed. One that has not become ready ends at once.
    - When a replica ends by itself, only the requests that it was answering fail. It is not replaced: that is for
      the caller to decide.
    - An ended replica is listed until it is forgotten. Its name is given to another one afterwards.
    - Replicas end with the process that started them.
    """

    def start(self, *, replaces: str | None = None) -> str:
        """Start a replica and return its name; OSError if that is impossible.

        Where it `replaces` another one, that one drains as soon as this one is ready, and not before.
        """

    def stop(self, name: str, *, within: timedelta) -> None:
        """Let a replica answer what it has, and end. One that drains already keeps its deadline."""

    def forget(self, name: str) -> None:
        """Remove an ended replica from the list."""

    def replicas(self) -> Sequence[Replica]:
        """Return all replicas, oldest first, as of now."""

    def has_waiting_clients(self) -> bool:
        """Tell whether a client waits for its connection to be accepted. Asked while no replica is ready."""

    def close(self, *, within: timedelta) -> None:
        """Stop all replicas, wait for their end, and give up the address. The only method that waits."""
