"""A platform with the room of features, on stores of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from falaj.features.room import Features
from platforms import TWO_ZONES, OwnPlatform, make_platform


@dataclass
class Ground:
    """A platform, its room of features, and where their bytes lie."""

    platform: OwnPlatform
    features: Features
    folder: Path

    def put(self, name: str, rows: pa.Table, **where: object) -> str:
        """Upload rows as Arrow; the blob's id."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
        return self.platform.put(name, sink.getvalue().to_pybytes(), **where).id


@pytest.fixture(params=["sqlite", "postgres"])
def ground(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Ground]:
    """The test runs once on SQLite and once on PostgreSQL."""
    url = "sqlite" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    with make_platform(tmp_path, url, TWO_ZONES, environment=monkeypatch) as platform:
        yield from grounded(platform, tmp_path)


@pytest.fixture
def light_ground(tmp_path: Path) -> Iterator[Ground]:
    """The same on SQLite only, for what does not depend on the database."""
    with make_platform(tmp_path, toml=TWO_ZONES) as platform:
        yield from grounded(platform, tmp_path)


def grounded(platform: OwnPlatform, folder: Path) -> Iterator[Ground]:
    yield Ground(platform, platform.features, platform.home.path)
