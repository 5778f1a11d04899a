"""A platform with the registry in it. Its schema is copied, not migrated anew for each test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from falaj.drivers.sql.migrate import migrate
from falaj.governance.caller import Caller
from falaj.records.identity import Role
from falaj.records.registry import ModelVersion
from falaj.registry.models import Models
from model_files import onnx
from platforms import TWO_ZONES, OwnPlatform, make_platform

if TYPE_CHECKING:
    from conftest import PostgresServer

Register = Callable[..., ModelVersion]


@pytest.fixture(params=["sqlite", "postgres"])
def platform(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OwnPlatform]:
    """A platform with zones in two jurisdictions; the test runs once on SQLite and once on PostgreSQL."""
    if request.param == "sqlite":
        yield request.getfixturevalue("light_platform")
        return
    url = request.getfixturevalue("registry_on_postgres")
    with make_platform(tmp_path, url, TWO_ZONES, environment=monkeypatch) as made:
        yield made


@pytest.fixture
def light_platform(tmp_path: Path, registry_on_sqlite: Path) -> Iterator[OwnPlatform]:
    """The same on SQLite only, for what does not depend on the database."""
    (tmp_path / "home").mkdir()
    shutil.copy(registry_on_sqlite, tmp_path / "home" / "falaj.db")
    with make_platform(tmp_path, toml=TWO_ZONES) as made:
        yield made


@pytest.fixture
def models(request: pytest.FixtureRequest) -> Models:
    """The registry of the test's platform."""
    return platform_of(request).models


@pytest.fixture
def register(request: pytest.FixtureRequest, models: Models) -> Register:
    """Upload `data` and register it as the next version of `name`."""
    platform = platform_of(request)

    def register(name: str = "churn", data: bytes | None = None, path: str = "model.onnx", **more: Any):
        blob = platform.blob.upload(iter([onnx() if data is None else data]))
        return models.register(name, files=(blob.id,), paths=(path,), **more)

    return register


@pytest.fixture
def noor(request: pytest.FixtureRequest) -> Caller:
    """An approver."""
    return platform_of(request).join("noor", Role.APPROVER)


@pytest.fixture
def dana(request: pytest.FixtureRequest) -> Caller:
    """A developer who may approve too, but not her own."""
    return platform_of(request).join("dana", Role.DEVELOPER, Role.APPROVER)


def platform_of(request: pytest.FixtureRequest) -> OwnPlatform:
    light = "light_platform" in request.fixturenames and "platform" not in request.fixturenames
    return request.getfixturevalue("light_platform" if light else "platform")


@pytest.fixture(scope="session")
def registry_on_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("schema") / "falaj.db"
    migrate(f"sqlite:///{file}")
    return file


@pytest.fixture(scope="session")
def registry_schema(postgres_server: PostgresServer) -> str:
    name = postgres_server.create_database()
    migrate(postgres_server.url(name))
    return name


@pytest.fixture
def registry_on_postgres(postgres_server: PostgresServer, registry_schema: str) -> Iterator[str]:
    """The URL of a PostgreSQL database of the test's own, which has the schema."""
    name = f"{registry_schema}_{next(postgres_server.numbers)}"
    postgres_server.execute(f"CREATE DATABASE {name} TEMPLATE {registry_schema}")
    yield postgres_server.url(name)
    postgres_server.drop_database(name)
