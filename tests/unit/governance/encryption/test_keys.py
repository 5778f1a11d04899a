"""Data keys are wrapped by a rotating root, and destroying one erases its data in every process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from falaj.errors import Conflict, KeyUnavailable
from falaj.governance.tables import data_keys
from platforms import OwnPlatform, make_platform
from polling import A_MOMENT_S, eventually
from processes import running

if TYPE_CHECKING:
    from conftest import Token

DOOMED = Path(__file__).parents[3] / "killed_platform.py"


def stored_state(platform: OwnPlatform) -> dict[str, tuple[int, int, bytes]]:
    """Return every stored file: its inode, modification time and content."""
    files = [path for path in platform.home.blobs.rglob("*") if path.is_file()]
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def is_erased(read: Callable[[], Any]) -> bool:
    try:
        read()
    except KeyUnavailable:
        return True
    return False


def test_the_key_file_is_outside_the_home_and_readable_by_its_owner_only(light_platform: OwnPlatform) -> None:
    file = light_platform.home.key_file

    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o077 == 0
    assert not file.is_relative_to(light_platform.home.path)
    assert not [p for p in light_platform.home.path.rglob("*") if "key" in p.name and p.is_file()]


def test_every_workspace_has_a_key_of_its_own(platform: OwnPlatform) -> None:
    platform.workspaces.create("team-a")

    keys = platform.keys.list()

    assert [(key.workspace, key.version) for key in keys] == [("default", 1), ("platform", 1), ("team-a", 1)]
    wrapped = {bytes(row["wrapped"]) for row in platform.rows(data_keys)}
    assert len(wrapped) == 3


# ----------------------------------------------------------------------------------------------- rotation


def test_rotation_rewraps_keys_and_rewrites_no_blob(platform: OwnPlatform) -> None:
    platform.put("old", b"old bytes")
    before, old_root = stored_state(platform), platform.parts.keys.root

    rotation = platform.keys.rotate()

    assert stored_state(platform) == before
    assert rotation.rewrapped == 2
    assert rotation.root == platform.parts.keys.root != old_root
    assert {key.root for key in platform.keys.list()} == {rotation.root}
    platform.put("new", b"new bytes")
    assert (platform.get("old"), platform.get("new")) == (b"old bytes", b"new bytes")


@pytest.mark.slow
def test_old_blobs_stay_readable_after_rotation_in_every_process(platform: OwnPlatform) -> None:
    other = platform.again()
    platform.put("old", b"old bytes")
    before = other.get("old")

    for _ in range(3):
        platform.keys.rotate()

    assert before == other.get("old") == platform.again().get("old") == b"old bytes"


def test_old_blobs_and_the_log_stay_readable_after_rotation_and_reopening(tmp_path: Path) -> None:
    with make_platform(tmp_path) as platform:
        platform.put("old", b"old bytes")
        platform.keys.rotate()

    with make_platform(tmp_path) as reopened:
        assert reopened.get("old") == b"old bytes"
        assert reopened.verify_audit().problems == ()


# -------------------------------------------------------------------------------------------- destruction


def test_a_destroyed_key_erases_its_workspace_and_no_other(platform: OwnPlatform) -> None:
    platform.workspaces.create("doomed")
    platform.put("data", b"bytes", workspace="doomed")
    platform.put("data", b"bytes")
    other = platform.again()
    assert other.get("doomed/data") == b"bytes"

    proof = platform.keys.destroy("doomed")

    eventually(lambda: is_erased(lambda: platform.get("doomed/data")))
    eventually(lambda: is_erased(lambda: other.get("doomed/data")))
    assert (proof.workspace, proof.versions, proof.blobs) == ("doomed", (1,), 1)
    assert platform.get("data") == other.get("data") == b"bytes"
    assert is_erased(lambda: platform.blobs.upload(iter([b"x"]), workspace="doomed"))
    assert [r["wrapped"] for r in platform.rows(data_keys) if r["destroyed_at"]] == [None]


@pytest.mark.slow
def test_another_process_sees_the_destruction(platform: OwnPlatform, tmp_path: Path) -> None:
    platform.workspaces.create("doomed")
    platform.put("data", b"bytes", workspace="doomed")

    with running(DOOMED, str(tmp_path), "read_often", "doomed/data") as reader:
        assert reader.line() == "read 5"
        platform.keys.destroy("doomed")
        eventually(lambda: reader.line() == "KeyUnavailable", every=0)


def test_keys_stay_destroyed_after_rotation_and_reopening(light_platform: OwnPlatform) -> None:
    light_platform.put("data", b"bytes")
    light_platform.keys.destroy("default")

    light_platform.keys.rotate()

    assert is_erased(lambda: light_platform.again().get("data"))


def test_a_key_destroyed_during_a_rotation_stays_destroyed(
    platform: OwnPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.put("data", b"bytes")
    other, keys = platform.again(), platform.parts.keys
    real, destroyed = keys.unwrap, threading.Event()

    def destroy() -> None:
        other.keys.destroy("default")
        destroyed.set()

    def unwrap(*args: Any, **kwargs: Any) -> bytes:
        if not thread.is_alive() and not destroyed.is_set():
            thread.start()
        destroyed.wait(A_MOMENT_S)  # it may have to wait until the rotation is over
        return real(*args, **kwargs)

    thread = threading.Thread(target=destroy)
    monkeypatch.setattr(keys, "unwrap", unwrap)
    platform.keys.rotate()
    thread.join()

    assert destroyed.is_set()
    assert is_erased(lambda: platform.again().get("data"))


def test_a_key_is_destroyed_once_and_the_platform_key_never(light_platform: OwnPlatform) -> None:
    light_platform.keys.destroy("default")

    with pytest.raises(Conflict, match="destroyed already"):
        light_platform.keys.destroy("default")
    with pytest.raises(Conflict, match="platform's own key"):
        light_platform.keys.destroy("platform")


def test_keys_are_provided_while_other_threads_drop_theirs(
    light_platform: OwnPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = light_platform.workspaces.show("default").id
    keyring = light_platform.parts.services.keys._keyring
    monkeypatch.setattr(keyring, "_epoch", EverNewEpoch())

    def ask(_: int) -> set[int]:
        return {keyring.current(workspace).version for _ in range(400)}

    with switching_often(), ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(ask, range(4)))

    assert seen == [{1}] * 4


@contextmanager
def switching_often() -> Iterator[None]:
    """Let threads switch as often as possible, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class EverNewEpoch:
    """An epoch that has changed each time it is read."""

    def __init__(self) -> None:
        self._numbers = count()

    def value(self) -> int:
        return next(self._numbers)


# -------------------------------------------------------------------------------------------------- HSM


def test_keys_in_a_security_module(tmp_path: Path, softhsm: Token, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_TEST_PIN", softhsm.pin)
    toml = f"""
[keys]
driver = "pkcs11"
module = "{softhsm.module}"
token = "{softhsm.label}"
pin = "env:FALAJ_TEST_PIN"
"""
    with make_platform(tmp_path, toml=toml) as platform:
        platform.workspaces.create("doomed")
        platform.put("data", b"bytes")
        platform.put("data", b"bytes", workspace="doomed")
        rotation = platform.keys.rotate()
        platform.keys.destroy("doomed")

    with make_platform(tmp_path, toml=toml) as reopened:
        assert reopened.get("data") == b"bytes"
        assert is_erased(lambda: reopened.get("doomed/data"))
        assert {key.root for key in reopened.keys.list() if not key.destroyed_at} == {rotation.root}
        assert reopened.verify_audit().problems == ()
        assert not reopened.home.key_file.exists()
