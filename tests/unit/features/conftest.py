"""A platform with the feature store, on stores of the test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from falaj.features.service import Features
from platforms import OwnPlatform


@dataclass
class FeaturesEnv:
    """A platform, its feature store, and the folder of its data."""

    platform: OwnPlatform
    features: Features
    folder: Path

    def put(self, name: str, rows: pa.Table, **where: object) -> str:
        """Upload rows as Arrow, and return the blob's id."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
        return self.platform.put(name, sink.getvalue().to_pybytes(), **where).id


@pytest.fixture
def env(platform: OwnPlatform) -> FeaturesEnv:
    """A feature store; the test runs on SQLite and on PostgreSQL."""
    return FeaturesEnv(platform, platform.features, platform.home.path)


@pytest.fixture
def light_env(light_platform: OwnPlatform) -> FeaturesEnv:
    """The same on SQLite only, for tests that do not depend on the database."""
    return FeaturesEnv(light_platform, light_platform.features, light_platform.home.path)
