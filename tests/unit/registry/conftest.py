"""The registry on a real platform, with users who register and approve."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from falaj.governance.operations.call import current_call
from falaj.governance.operations.caller import Caller
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import operation
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import StoredObject
from falaj.records.names import Name, WorkspaceRef
from falaj.records.registry import ModelVersion
from falaj.registry.service import Models
from model_files import onnx
from platforms import OwnPlatform

if TYPE_CHECKING:
    pass

Register = Callable[..., ModelVersion]
MakeDataset = Callable[..., StoredObject]


class DatasetFactory:
    """Makes training sets without rows, so that tests of the registry need no features."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @operation("stand.make", resource="workspace")
    def make(self, name: Name, *, workspace: WorkspaceRef | None = None) -> StoredObject:
        """Make a training set."""
        call = current_call()
        return call.create("dataset", name, workspace=call.target, zone="local")


@pytest.fixture
def make_dataset(request: pytest.FixtureRequest) -> MakeDataset:
    """Make a training set by name."""
    return DatasetFactory(platform_of(request).gate_with(DatasetFactory)).make


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
