"""Versions that cannot be loaded: they are tried again with growing pauses, and only while that can help."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from falaj.apps.model_server.platform.load_retries import LoadRetries
from falaj.apps.model_server.platform.recorder import VersionKey
from falaj.apps.model_server.platform.reload import DeploymentReloader
from falaj.assembly.model_server import version_opener
from falaj.errors import Damaged, FalajError, InvalidInput, NotFound, Unavailable
from falaj.records.serving.endpoints import Deployment, Endpoint, LoadProblem, ServedFile
from falaj.records.serving.settings import MeasuredVersion
from model_servers import constant
from platforms import OwnPlatform, make_platform

KEY: VersionKey = ("endpoint", "1")


def test_pauses_grow_to_ten_minutes() -> None:
    retries, now, pauses = LoadRetries(), 0.0, []

    for _ in range(9):
        retries.failed(KEY, "file", Unavailable("no memory"), now)
        pauses.append(retries.next_at - now)
        now = retries.next_at

    assert pauses == [10, 20, 40, 80, 160, 320, 600, 600, 600]


@pytest.mark.parametrize("error", [InvalidInput("no model"), Damaged("wrong hash"), NotFound("no file")])
def test_what_no_attempt_mends_is_not_tried_again(error: FalajError) -> None:
    retries = LoadRetries()

    retries.failed(KEY, "file", error, 0.0)

    assert retries.next_at == float("inf")
    assert retries.problem(KEY, "file", 1e9) == error.message
    assert retries.problem(KEY, "changed", 1.0) is None


def test_a_reason_is_new_once() -> None:
    retries = LoadRetries()

    told = [
        retries.failed(KEY, "file", Unavailable(words), at)
        for at, words in ((0, "a"), (10, "a"), (30, "b"), (70, "b"))
    ]

    assert told == [True, False, True, False]


def test_versions_that_are_served_again_start_anew() -> None:
    retries = LoadRetries()
    for at in (0, 10, 30):
        retries.failed(KEY, "file", Unavailable("no memory"), at)

    retries.keep(set())
    retries.failed(KEY, "file", Unavailable("no memory"), 100)

    assert retries.next_at == 110


class FailingServer:
    """A model server that cannot load what it should, and counts its attempts."""

    def __init__(self) -> None:
        self.error: FalajError | None = None
        self.attempts = 0
        self.served: Deployment | None = None

    async def prepare(self, file: ServedFile, endpoint: Endpoint) -> None:
        self.attempts += 1
        if self.error is not None:
            raise self.error

    def measured(self, file: ServedFile) -> MeasuredVersion | None:
        return None

    async def apply(self, deployment: Deployment) -> None:
        self.served = deployment


class Reloading:
    """A reloader of a platform whose model server fails, with a clock of its own."""

    def __init__(self, platform: OwnPlatform) -> None:
        self.server, self.now = FailingServer(), 0.0
        self.reported: list[str | None] = []
        self.reloader = DeploymentReloader(
            platform.parts.database,
            cast(Any, self.server),
            cast(Any, SimpleNamespace()),
            cast(Any, SimpleNamespace(sources={})),
            version_opener(platform.parts.services),
            self._report,
            lambda *_: None,
            clock=lambda: self.now,
        )

    def _report(
        self,
        endpoint: str,
        *,
        problems: tuple[LoadProblem, ...] = (),
        measured: tuple[MeasuredVersion, ...] = (),
    ) -> None:
        self.reported += [each.problem for each in problems]

    def sync_at(self, now: float) -> int:
        """Reconcile, and return how many attempts to load a model that made."""
        self.now, before = now, self.server.attempts
        asyncio.run(self.reloader.sync())
        return self.server.attempts - before


def deployed(platform: OwnPlatform, folder: Path) -> Reloading:
    content = constant(folder / "m.onnx", 1).read_bytes()
    blob = platform.blobs.upload(iter([content]))
    platform.models.register("m", files=(blob.id,), paths=("model.onnx",))
    platform.endpoints.deploy("m", model="m@1")
    return Reloading(platform)


@pytest.mark.slow
def test_a_bad_file_is_tried_once_for_each_deployment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_platform(tmp_path) as platform:
        reloading = deployed(platform, tmp_path)
        reloading.server.error = InvalidInput("m@1 uses an operator that is not supported")

        with caplog.at_level(logging.ERROR):
            attempts = [reloading.sync_at(at) for at in (0, 20, 1e6)]
            platform.clock.advance(timedelta(seconds=1))
            platform.endpoints.deploy("m", model="m@1")
            attempts.append(reloading.sync_at(1e6 + 1))

    assert attempts == [1, 0, 0, 1]
    assert reloading.reported == ["m@1 uses an operator that is not supported"]
    assert len([each for each in caplog.records if "is not served" in each.message]) == 2


@pytest.mark.slow
def test_a_passing_failure_is_tried_again_and_recovers(tmp_path: Path) -> None:
    with make_platform(tmp_path) as platform:
        reloading = deployed(platform, tmp_path)
        reloading.server.error = Unavailable("no worker process can be started")

        attempts = [reloading.sync_at(at) for at in (0, 9, 10, 29, 30)]
        reloading.server.error = None
        attempts += [reloading.sync_at(at) for at in (69, 70)]

    assert attempts == [1, 0, 1, 0, 1, 0, 1]
    assert reloading.reported == ["no worker process can be started", None]
    assert reloading.server.served is not None
    assert len(reloading.server.served.endpoints) == 1
