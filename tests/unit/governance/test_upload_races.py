"""An upload during the destruction of its key or a sweep fails, or its bytes are complete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from falaj.errors import KeyUnavailable, NotFound
from falaj.governance.blobs import service
from platforms import OwnPlatform
from polling import PATIENCE_S

DATA = bytes(range(256)) * 1000
A_MOMENT_S = 0.3
"""How long one side waits for the other, which may have to wait for it."""


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def finish(future: Future[Any]) -> None:
    """Wait for a concurrent task."""
    with suppress(TimeoutError):
        future.exception(A_MOMENT_S)


# ------------------------------------------------------------------------------------------- destroyed keys


def test_a_key_destroyed_while_bytes_come_in_fails_the_upload(
    platform: OwnPlatform, beside: ThreadPoolExecutor
) -> None:
    other = platform.again()

    def data() -> Iterator[bytes]:
        yield DATA
        beside.submit(other.keys.destroy, "default").result()

    with pytest.raises(KeyUnavailable):
        platform.blobs.upload(data())

    assert platform.blobs.list().items == ()


def test_nothing_is_acknowledged_after_its_key_was_destroyed(
    platform: OwnPlatform, beside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, destroyed = platform.again(), []
    require = service.require_living_key

    def require_and_destroy(*args: Any) -> None:
        require(*args)  # the blob is readable
        destroyed.append(beside.submit(other.keys.destroy, "default"))
        finish(destroyed[0])

    monkeypatch.setattr(service, "require_living_key", require_and_destroy)
    acknowledged = platform.blobs.upload(iter([DATA]))

    proof = destroyed[0].result()
    order = [
        entry["action"] for entry in platform.entries() if entry["action"].split(".")[0] in ("blobs", "keys")
    ]
    assert acknowledged.size_bytes == len(DATA)
    assert order == ["blobs.upload", "keys.destroy"]
    assert proof.blobs == 1


# ------------------------------------------------------------------------------------------------ sweeping


@pytest.mark.parametrize("look", [1, 2])
def test_a_sweep_during_an_upload_removes_nothing_acknowledged(
    platform: OwnPlatform, beside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, look: int
) -> None:
    other, written, looked = platform.again(), threading.Event(), threading.Event()
    monkeypatch.setattr(other.parts.gate, "commit", held_back(other.parts.gate.commit, written, looked))
    platform.clock.advance(
        timedelta(days=3)
    )  # the bytes look old enough to be swept as soon as they are written
    upload = beside.submit(other.blobs.upload, iter([DATA]))
    assert written.wait(PATIENCE_S)
    is_living, looks = service._is_living, []

    def look_and_let_in(*args: Any, **kwargs: Any) -> bool:
        found = is_living(*args, **kwargs)
        looks.append(found)
        if len(looks) == look:
            looked.set()
            finish(upload)
        return found

    monkeypatch.setattr(service, "_is_living", look_and_let_in)
    platform.blobs.cleanup()
    looked.set()

    failure = upload.exception(PATIENCE_S)
    assert failure is None or isinstance(failure, NotFound)
    kept = [platform.get(found.id) for found in platform.blobs.list().items]
    assert kept == ([DATA] if failure is None else [])
    assert looks[0] is False


def held_back(
    commit: Callable[..., Any], written: threading.Event, go: threading.Event
) -> Callable[..., Any]:
    """A commit that signals when the bytes are written, and then waits."""

    def late(*args: Any) -> Any:
        written.set()
        assert go.wait(PATIENCE_S)
        return commit(*args)

    return late
