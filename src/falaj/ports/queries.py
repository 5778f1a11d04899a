"""The port for queries: SQL over the inputs that the caller passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

ArrowTable: TypeAlias = Any
"""A pyarrow Table."""

ArrowInput: TypeAlias = Any
"""A pyarrow Table or Dataset."""


class QueryEngine(Protocol):
    """Runs one SELECT over named inputs. The statement cannot reach files, the network or settings.

    Timestamps are microseconds in UTC. A statement that is not allowed, is invalid or exceeds its time limit raises
    InvalidInput; one that exceeds its memory limit raises TooLarge.
    """

    def select(self, sql: str, inputs: Mapping[str, ArrowInput]) -> ArrowTable:
        """Return the rows that `sql` selects from `inputs`, which it refers to by their names."""
        ...
