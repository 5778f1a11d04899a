"""The doors that the tests of the HTTP door and its client knock at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from interfaces import ServedPlatform, serve


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPlatform]:
    """A door that the tests of a module share, on SQLite."""
    with serve(tmp_path_factory.mktemp("served")) as door:
        yield door


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def served_on_each(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedPlatform]:
    """A door that the tests of a module share, once on SQLite and once on PostgreSQL."""
    with ExitStack() as stack:
        url = "sqlite"
        if request.param == "postgres":
            server = request.getfixturevalue("postgres_server")
            name = server.create_database()
            stack.callback(server.drop_database, name)
            url = server.url(name)
        yield stack.enter_context(serve(tmp_path_factory.mktemp("served"), url=url))
