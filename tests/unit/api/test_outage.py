"""A metadata database that becomes unavailable and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from falaj.errors import Unavailable
from interfaces import ServedPlatform, serve
from polling import eventually

pytestmark = pytest.mark.slow


@pytest.fixture
def database(postgres_server: Any) -> Iterator[str]:
    name = postgres_server.create_database()
    yield name
    postgres_server.drop_database(name)


@pytest.fixture
def served(postgres_server: Any, database: str, tmp_path: Path) -> Iterator[ServedPlatform]:
    with serve(tmp_path, url=postgres_server.url(database)) as platform:
        yield platform


@contextmanager
def away(server: Any, database: str) -> Iterator[None]:
    """Make the database refuse connections, and close the open ones."""
    cut = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'"
    server.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false", cut)
    try:
        yield
    finally:
        server.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true")


def test_an_outage_is_reported_until_it_ends(
    postgres_server: Any, database: str, served: ServedPlatform
) -> None:
    platform = served.platform
    platform.workspaces.create("before")

    with away(postgres_server, database):
        with pytest.raises(Unavailable):
            platform.workspaces.create("meanwhile")
        assert served.as_nobody.get("/healthz").status_code == 200
        assert served.as_nobody.get("/readyz").status_code == 503
    eventually(lambda: platform.workspaces.create("after"))

    names = {each.name for each in platform.workspaces.list().items}
    assert {"before", "after"} <= names
    assert "meanwhile" not in names


def test_an_outage_does_not_show_the_database_address_to_unauthenticated_callers(
    postgres_server: Any, database: str, served: ServedPlatform
) -> None:
    with away(postgres_server, database):
        answer = served.http("fj_unknown.token").get("/api/v1/users/whoami")

    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert database not in answer.text
    assert str(postgres_server.socket_dir) not in answer.text
