"""A platform with an endpoint and a training set, and servers that deliver windows of generated rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa
import pytest

from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import operation
from falaj.monitoring.service import Monitoring
from falaj.monitoring.windows.collector import Collector
from falaj.records.governance.objects import StoredObject
from falaj.records.monitoring.monitors import Monitor, WindowRecord
from falaj.records.monitoring.sketches import ColumnRole
from falaj.records.names import AnyRef, Name, WorkspaceRef
from platforms import InternalAsController, OwnPlatform

SLOT = timedelta(seconds=10)
Rows = Mapping[str, Any]


class ObjectFactory:
    """Makes objects of other services, so that tests of this one need not run them."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @operation("stand.make", resource="workspace")
    def make(
        self,
        kind: Name,
        name: Name,
        *,
        workspace: WorkspaceRef | None = None,
        sources: tuple[AnyRef, ...] = (),
    ) -> StoredObject:
        """Make an object."""
        call = current_call()
        return call.create(kind, name, workspace=call.target, zone="local")


@dataclass
class MonitoringEnv:
    """The monitoring service on a real platform. Training sets are tables of the test, by the name of their object."""

    platform: OwnPlatform
    service: Monitoring
    factory: ObjectFactory
    tables: dict[str, pa.Table] = field(default_factory=dict)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def training_set(self, name: str, rows: Rows, *, sources: tuple[str, ...] = ()) -> str:
        self.tables[name] = pa.table({column: pa.array(values) for column, values in rows.items()})
        return self.factory.make("dataset", name, sources=sources).id

    def watched(self, rows: Rows, **options: Any) -> Monitor:
        """Create the endpoint `delay` and a monitor of it on a training set of `rows`."""
        self.factory.make("endpoint", "delay")
        self.training_set("flights", rows)
        return self.service.watch("delay", reference="flights", **options)

    def serve(self, rows: Rows, *, version: str = "3", answers: Rows | None = None) -> WindowRecord:
        """Return the window that a server with `rows` delivers ten seconds later."""
        collector = Collector(clock=self.platform.clock)
        collector.add("delay", version, rows)
        if answers is not None:
            collector.add("delay", version, answers, role=ColumnRole.PREDICTION)
        self.platform.clock.advance(SLOT)
        (served,) = collector.flush()
        return served.window

    def deliver(self, rows: Rows, **options: Any) -> None:
        self.service.record("delay", windows=(self.serve(rows, **options),))

    def again(self) -> Monitoring:
        """Return the service of another process on the same database."""
        return service_on(self.platform.again(), self.tables)


def service_on(platform: OwnPlatform, tables: dict[str, pa.Table]) -> Monitoring:
    service = platform.monitoring
    factory = partial(_stream, tables)
    made = Monitoring(platform.gate_with(ObjectFactory), training_set=factory, sealed=service._sealed)
    return cast(Monitoring, InternalAsController(made, platform))


def _stream(tables: dict[str, pa.Table], found: StoredObject) -> pa.RecordBatchReader:
    return tables[found.name].to_reader(max_chunksize=1000)


def make_env(platform: OwnPlatform) -> MonitoringEnv:
    tables: dict[str, pa.Table] = {}
    return MonitoringEnv(
        platform, service_on(platform, tables), ObjectFactory(platform.gate_with(ObjectFactory)), tables
    )


@pytest.fixture
def env(platform: OwnPlatform) -> MonitoringEnv:
    """A monitoring service; the test runs on SQLite and on PostgreSQL."""
    return make_env(platform)


@pytest.fixture
def light_env(light_platform: OwnPlatform) -> MonitoringEnv:
    """The same on SQLite only, for tests that do not depend on the database."""
    return make_env(light_platform)


class MakeEndpoint(Protocol):
    def __call__(self, platform: OwnPlatform, name: str) -> str: ...


@pytest.fixture
def make_endpoint() -> MakeEndpoint:
    """Make an endpoint that serves nothing."""
    return lambda platform, name: ObjectFactory(platform.gate_with(ObjectFactory)).make("endpoint", name).id
