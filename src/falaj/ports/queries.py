"""The port for queries: SQL over the inputs that the caller passes."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol, TypeAlias

from falaj.ports.machine.memory import MemoryLease

ArrowTable: TypeAlias = Any
"""A pyarrow Table."""

ArrowInput: TypeAlias = Any
"""A pyarrow Table or Dataset."""


class QueryEngine(Protocol):
    """Runs one SELECT over named inputs. The statement cannot reach files, the network or settings.

    Names of columns are compared without case; an input in which two are the same is refused with InvalidInput.
    Timestamps are microseconds in UTC. A statement that is not allowed, is invalid or exceeds its time limit raises
    InvalidInput; one that exceeds its memory limit raises TooLarge.
    """

    def select(
        self, sql: str, inputs: Mapping[str, ArrowInput], *, memory: MemoryLease | None = None
    ) -> ArrowTable:
        """Return the rows that `sql` selects from `inputs`, which it refers to by their names.

        The result is held in `memory` until the lease ends; without a lease it counts only while it is computed.
        """
        ...

    def delete_spilled(self, *, before: datetime) -> int:
        """Delete what statements that were killed before `before` left on disk, and return of how many.

        What a running statement may use stays, however late `before` is.
        """
        ...
