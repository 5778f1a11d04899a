"""What computes over rows: SQL on the inputs that are handed in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

ArrowTable: TypeAlias = Any
"""A pyarrow Table."""

ArrowInput: TypeAlias = Any
"""A pyarrow Table or Dataset."""


class QueryEngine(Protocol):
    """One SELECT over named inputs, and over nothing else: no file, no network, no setting is within its reach.

    Moments are microseconds in UTC. A statement that is refused, wrong or runs for too long raises InvalidInput, one
    that needs more memory than it may have TooLarge.
    """

    def select(self, sql: str, inputs: Mapping[str, ArrowInput]) -> ArrowTable: ...
