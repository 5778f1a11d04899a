"""What the feature store works with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime

from falaj.governance.blobs.contents import BlobContents
from falaj.governance.encryption.blobs import EncryptedBlobs
from falaj.governance.operations.gate import Gate
from falaj.ports.machine.memory import MemoryBudget, MemoryLease
from falaj.ports.parsers import ParserPool
from falaj.ports.queries import ArrowInput, ArrowTable, QueryEngine
from falaj.ports.tables import TableStore


@dataclass(frozen=True)
class FeatureBackends:
    """The gate and the drivers of the feature store; stores are keyed by zone. All calls share the budget."""

    gate: Gate
    blobs: Mapping[str, EncryptedBlobs]
    tables: Mapping[str, TableStore]
    queries: QueryEngine
    parsers: ParserPool
    budget: MemoryBudget

    @property
    def contents(self) -> BlobContents:
        """The bytes of blobs that belong to views and training sets."""
        return BlobContents(self.gate.database, self.blobs, platform=self.gate.audit.log_id)

    @contextmanager
    def leased(self) -> Iterator[tuple[FeatureBackends, MemoryLease]]:
        """The backends for one call, whose rows and query results are held in the lease beside them."""
        with self.budget.lease() as memory:
            yield replace(self, queries=_LeasedQueries(self.queries, memory)), memory


@dataclass(frozen=True)
class _LeasedQueries:
    """A QueryEngine whose results are held in one lease."""

    queries: QueryEngine
    lease: MemoryLease

    def select(
        self, sql: str, inputs: Mapping[str, ArrowInput], *, memory: MemoryLease | None = None
    ) -> ArrowTable:
        return self.queries.select(sql, inputs, memory=memory or self.lease)

    def delete_spilled(self, *, before: datetime) -> int:
        return self.queries.delete_spilled(before=before)
