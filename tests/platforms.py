"""A real platform in a directory of the test: its database, zones and users, and a clock that the test owns."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self

import pytest
from sqlalchemy import Table, func, select, text

from falaj.assembly.home import open_home
from falaj.assembly.platform import LocalPlatform as Assembled
from falaj.assembly.platform import assemble
from falaj.control.authorization import controller_caller
from falaj.control.services import all_operations
from falaj.governance.operations.caller import Caller, acting_as, current_caller
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import operations_of
from falaj.governance.policy.authorizer import Authorizer
from falaj.governance.tables import audit_entries
from falaj.records.governance.identity import PrincipalKind, Role
from falaj.records.names import PrincipalId
from falaj.records.record import utc_now
from falaj.sdk.platform import Platform

URL_VARIABLE = "FALAJ_TEST_METADATA_URL"

TWO_ZONES = """
[zones.local]
jurisdiction = "AE"
default = true

[zones.frankfurt]
jurisdiction = "DE"

[node]
zone = "local"
"""


class Clock:
    """Stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = utc_now()

    def __call__(self) -> datetime:
        return self.now

    def advance(self, by: timedelta) -> None:
        self.now += by


class OwnPlatform(Platform):
    """The services under their names, and the internals that a test looks at."""

    def __init__(self, parts: Assembled, clock: Clock) -> None:
        self.parts = parts
        self.clock = clock
        self.home = parts.home
        self.database = parts.database
        self._open = ExitStack()
        self._open.callback(parts.close)
        super().__init__(parts.services, where=str(parts.home.path), on_close=self._open.close)

    def again(self, *, as_owner: bool = True) -> Self:
        """Open a second platform on the same home and database, as another process would."""
        parts = assemble(self.home, config=self.parts.config, as_owner=as_owner, clock=self.clock)
        return self._open.enter_context(type(self)(parts, self.clock))

    def join(
        self, name: str, *roles: Role, workspace: str = "default", kind: PrincipalKind = "user"
    ) -> Caller:
        """Create a user with `roles` in `workspace`, and return them as a caller."""
        person = self.users.create(name, kind=kind)
        for role in roles:
            self.workspaces.grant(workspace, name, role=role)
        return Caller(PrincipalId(person.id), name, kind, "test")

    def as_controller(self) -> AbstractContextManager[None]:
        """Act as the controller's service account."""
        return acting_as(controller_caller(self.database))

    def caller_of(self, secret: str) -> Caller:
        """Return the caller that a token authenticates."""
        return self.parts.authenticator.authenticate(secret, origin="test")[0]

    def gate_with(self, *services: type) -> Gate:
        """Return a gate like the platform's that also knows the operations of `services`."""
        gate = copy.copy(self.parts.gate)
        extra = [op for service in services for op in operations_of(service).values()]
        gate.authorizer = Authorizer([*all_operations().values(), *extra])
        return gate

    def count(self, table: Table) -> int:
        with self.database.read() as tx:
            return int(tx.execute(select(func.count()).select_from(table)).scalar_one())

    def rows(self, table: Table) -> list[dict[str, Any]]:
        with self.database.read() as tx:
            return [dict(row) for row in tx.execute(select(table)).mappings()]

    def rows_of(self, query: str) -> list[Any]:
        """Return the first column of a query's result."""
        with self.database.read() as tx:
            return list(tx.execute(text(query)).scalars())

    def sql(self, statement: str, parameters: Sequence[dict[str, Any]] | dict[str, Any] | None = None) -> int:
        """Change the database directly, and return the number of rows changed."""
        with self.database.write() as tx:
            return tx.execute(text(statement), parameters).rowcount

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries of the audit log, in order."""
        rows = sorted(self.rows(audit_entries), key=lambda row: row["seq"])
        return [json.loads(row["entry"]) for row in rows]


class InternalAsController:
    """A service whose internal operations are performed by the controller, unless a caller is set already."""

    def __init__(self, service: Any, platform: OwnPlatform) -> None:
        self._service, self._platform = service, platform

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._service, name)
        operation = getattr(member, "operation", None)
        if operation is None or not operation.internal:
            return member

        def call(*args: Any, **kwargs: Any) -> Any:
            if current_caller() is not None:
                return member(*args, **kwargs)
            with self._platform.as_controller():
                return member(*args, **kwargs)

        return call


def make_platform(
    tmp_path: Path,
    url: str = "sqlite",
    toml: str = "",
    *,
    environment: pytest.MonkeyPatch | None = None,
    clock: Clock | None = None,
) -> OwnPlatform:
    """Yield a platform whose home and keys are in `tmp_path`, acting as its owner; PostgreSQL needs an `environment`.

    Heads are signed when the log is read or the platform closed, not by the clock, unless `toml` sets it.
    """
    home = open_home(tmp_path / "home", tmp_path / "config")
    home.toml.write_text(configuration(url, toml))
    if environment is not None:
        environment.setenv(URL_VARIABLE, url)
    clock = clock or Clock()
    return OwnPlatform(assemble(home, as_owner=True, clock=clock), clock)


def configuration(url: str, toml: str) -> str:
    """Return falaj.toml for a database; `toml` comes first, because it may begin with top-level keys."""
    parts = [toml]
    if "[audit]" not in toml:
        parts.append("[audit]\nsign_every = 3600")
    if not url.startswith("sqlite"):
        parts.append(f'[metadata]\ndriver = "postgres"\nurl = "env:{URL_VARIABLE}"')
    return "\n\n".join(parts)
