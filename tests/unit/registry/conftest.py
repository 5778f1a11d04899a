"""The registry on a real platform, with users who register and approve."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from falaj.governance.operations.caller import Caller
from falaj.records.governance.identity import Role
from falaj.records.registry import ModelVersion
from falaj.registry.service import Models
from model_files import onnx
from platforms import OwnPlatform

if TYPE_CHECKING:
    pass

Register = Callable[..., ModelVersion]


@pytest.fixture
def models(request: pytest.FixtureRequest) -> Models:
    """The registry of the test's platform."""
    return platform_of(request).models


@pytest.fixture
def register(request: pytest.FixtureRequest, models: Models) -> Register:
    """Upload `data` and register it as the next version of `name`."""
    platform = platform_of(request)

    def register(name: str = "churn", data: bytes | None = None, path: str = "model.onnx", **more: Any):
        blob = platform.blobs.upload(iter([onnx() if data is None else data]))
        return models.register(name, files=(blob.id,), paths=(path,), **more)

    return register


@pytest.fixture
def noor(request: pytest.FixtureRequest) -> Caller:
    """An approver."""
    return platform_of(request).join("noor", Role.APPROVER)


@pytest.fixture
def dana(request: pytest.FixtureRequest) -> Caller:
    """A developer who may approve, but not her own versions."""
    return platform_of(request).join("dana", Role.DEVELOPER, Role.APPROVER)


def platform_of(request: pytest.FixtureRequest) -> OwnPlatform:
    light = "light_platform" in request.fixturenames and "platform" not in request.fixturenames
    return request.getfixturevalue("light_platform" if light else "platform")
