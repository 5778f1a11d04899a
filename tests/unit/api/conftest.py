"""Served platforms for the tests of the HTTP API and its client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from interfaces import ServedPlatform, serve


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPlatform]:
    """A served platform on SQLite, shared by the tests of a module."""
    with serve(tmp_path_factory.mktemp("served")) as platform:
        yield platform


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def served_on_each(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedPlatform]:
    """A served platform shared by the tests of a module, on SQLite and on PostgreSQL."""
    with ExitStack() as stack:
        url = "sqlite"
        if request.param == "postgres":
            server = request.getfixturevalue("postgres_server")
            name = server.create_database()
            stack.callback(server.drop_database, name)
            url = server.url(name)
        yield stack.enter_context(serve(tmp_path_factory.mktemp("served"), url=url))
