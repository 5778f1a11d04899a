"""A platform with prices and fake nodes, and attempts that begin and end when the test says."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from falaj.control.workflows.service import IntentQueue
from falaj.governance import objects
from falaj.governance.operations.caller import Caller, acting_as
from falaj.ports.metadata import Transaction
from falaj.records.config import Prices
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId, PrincipalId, new_id
from falaj.records.scheduling.accounting import ResourceUsage
from falaj.records.scheduling.snapshot import Gpu, Node, Placement, Request, Resources
from falaj.scheduling.accounting.accounts import QueueAccounts
from falaj.scheduling.service import Queues, Usage
from platforms import TWO_ZONES, Clock, OwnPlatform, make_platform

NOON = datetime(2026, 3, 11, 12, tzinfo=UTC)
"""A Wednesday."""

H200 = "NVIDIA H200"
PRICES = Prices(currency="AED", cpu_hour=0.5, gpu_hour=8.0, gpu_models={H200: 12.5}, energy_kwh=0.25)
HALF_LIFE = timedelta(days=7)
NODE = Node(
    name="here",
    zone="local",
    jurisdiction="AE",
    cpus=64,
    memory_bytes=256 << 30,
    gpus=tuple(Gpu(id=f"GPU-{number}", model=H200, memory_bytes=1 << 37) for number in range(8)),
)


@dataclass
class FakeJobs:
    """The answers of the job service."""

    unfinished: dict[str, tuple[int, int]] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    changes: int = 0

    def unfinished_in_queues(self, tx: Transaction) -> dict[str, tuple[int, int]]:
        return dict(self.unfinished)

    def queue_changed(self, tx: Transaction) -> None:
        self.changes += 1

    def names_of_jobs(self, tx: Transaction, idents: Iterable[str]) -> dict[str, str]:
        return {ident: self.named[ident] for ident in idents if ident in self.named}


class SchedulingServices:
    """The scheduling services on fake nodes."""

    def __init__(
        self, platform: OwnPlatform, *, prices: Prices | None = PRICES, half_life: timedelta = HALF_LIFE
    ) -> None:
        self.platform = platform
        self.clock = platform.clock
        self.user = str(platform.users.whoami().principal.id)
        self.jobs = FakeJobs()
        self.accounts = QueueAccounts(nodes=lambda: (NODE,), prices=prices, half_life=half_life)
        gate = platform.parts.gate
        self.intents = IntentQueue()
        self.queues = Queues(
            gate,
            self.intents,
            accounts=self.accounts,
            jobs=self.jobs,
            sealed=platform.parts.services.queues._sealed,
            wanted=lambda: None,
        )
        self.usage = Usage(gate, accounts=self.accounts, jobs=self.jobs)

    def workspace(self, name: str) -> ObjectId:
        return self.platform.workspaces.create(name).id

    def submit(self, workspace: str = "default", *, name: str | None = None, **resources: Any) -> Request:
        """Return the request of a job; `resources` has its queue, and the resources of each replica."""
        queue, replicas = resources.pop("queue", "default"), resources.pop("replicas", 1)
        ident = new_id("job")
        with self.platform.database.write() as tx:
            home = objects.resolve(tx, workspace, kind="workspace", workspace="platform")
            new = StoredObject(
                id=ident,
                workspace=home.id,
                kind="job",
                name=ident,
                owner=PrincipalId(self.user),
                created_at=self.clock(),
            )
            objects.create(tx, new)
        if name is not None:
            self.jobs.named[ident] = name
        return Request(
            job=ident,
            queue=queue,
            replicas=replicas,
            each=Resources(**resources),
            submitted_at=self.clock(),
            workspace=home.id,
        )

    def begin(
        self,
        request: Request,
        *,
        attempt: int = 1,
        models: tuple[str, ...] | None = None,
        user: str | None = None,
    ) -> None:
        given = models if models is not None else (H200,) * (request.each.gpus * request.replicas)
        with self.platform.database.write() as tx:
            self.accounts.begin(
                tx,
                request,
                attempt=attempt,
                user=ObjectId(user or self.user),
                placements=(Placement(replica=0, node="here"),),
                gpu_models=given,
                borrows=False,
                now=self.clock(),
            )

    def end(self, request: Request, *, attempt: int = 1, verdict: str = "done", **used: Any) -> None:
        with self.platform.database.write() as tx:
            self.accounts.end(
                tx,
                request.job,
                attempt=attempt,
                verdict=verdict,
                used=ResourceUsage(**used),
                now=self.clock(),
            )

    def ran(
        self,
        workspace: str = "default",
        *,
        hours: float,
        used: dict[str, Any] | None = None,
        **resources: Any,
    ) -> Request:
        """Run a job that begins now and ends that many hours later."""
        request = self.submit(workspace, **resources)
        self.begin(request)
        self.clock.advance(timedelta(hours=hours))
        self.end(request, **(used or {}))
        return request

    def acting(self, name: str, *roles: Role, workspace: str = "default") -> AbstractContextManager[None]:
        return acting_as(self.join(name, *roles, workspace=workspace))

    def join(self, name: str, *roles: Role, workspace: str = "default") -> Caller:
        return self.platform.join(name, *roles, workspace=workspace)


@pytest.fixture(params=["sqlite", "postgres"])
def services(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SchedulingServices]:
    """Scheduling services at noon of a Wednesday; the test runs on SQLite and on PostgreSQL."""
    clock = Clock()
    clock.now = NOON
    if request.param == "sqlite":
        (tmp_path / "home").mkdir()
        shutil.copy(request.getfixturevalue("sqlite_schema"), tmp_path / "home" / "falaj.db")
        with make_platform(tmp_path, toml=TWO_ZONES, clock=clock) as made:
            yield SchedulingServices(made)
        return
    url = request.getfixturevalue("schema_on_postgres")
    with make_platform(tmp_path, url, TWO_ZONES, environment=monkeypatch, clock=clock) as made:
        yield SchedulingServices(made)


@pytest.fixture
def light_services(tmp_path: Path, sqlite_schema: Path) -> Iterator[SchedulingServices]:
    """The same on SQLite only, for tests that do not depend on the database."""
    clock = Clock()
    clock.now = NOON
    (tmp_path / "home").mkdir()
    shutil.copy(sqlite_schema, tmp_path / "home" / "falaj.db")
    with make_platform(tmp_path, toml=TWO_ZONES, clock=clock) as made:
        yield SchedulingServices(made)
