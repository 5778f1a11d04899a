"""The lease of a holder that is known to be dead is taken at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from falaj.control import lease
from platforms import OwnPlatform, make_platform

LASTS = timedelta(seconds=10)
TELL = "from falaj.control.lease import holder_name; print(holder_name(), flush=True); input()"


class Process:
    """Another process, and the name under which it would hold the lease."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.name = process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def other() -> Iterator[Process]:
    with subprocess.Popen(
        [sys.executable, "-c", TELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Process(process)
        process.kill()


def holder(platform: OwnPlatform) -> str | None:
    with platform.database.read() as tx:
        return lease.held_by(tx, now=platform.clock())


def acquire(platform: OwnPlatform, name: str) -> int | None:
    return lease.acquire(platform.database, name, now=platform.clock(), lasts=LASTS)


def test_a_live_holder_keeps_the_lease(platform: OwnPlatform, other: Process) -> None:
    acquire(platform, other.name)

    assert holder(platform) == platform.platform.status().controller == other.name
    assert acquire(platform, "standby") is None


def test_a_dead_holder_loses_the_lease(platform: OwnPlatform, other: Process) -> None:
    first = acquire(platform, other.name)

    other.kill()

    assert holder(platform) is platform.platform.status().controller is None
    assert acquire(platform, lease.holder_name()) == (first or 0) + 1
    assert holder(platform) == lease.holder_name()


def test_a_holder_on_another_host_is_never_taken_for_dead(
    light_platform: OwnPlatform, other: Process
) -> None:
    other.kill()
    host, number, realm = other.name.rsplit(":", 2)
    elsewhere = [
        f"{host}:{number}",
        f"{host}:{number}:{'0' * len(realm)}",
        "embedded",
        "::",
        f"::{realm}",
        "",
    ]

    dead = [name for name in elsewhere if lease.is_dead(name)]

    assert dead == []
    assert lease.is_dead(f"another-name-of-this-host:{number}:{realm}")
    assert not lease.is_dead(f"{host}:{os.getpid()}:{realm}")
    assert not lease.is_dead(f"{host}:1:{realm}")  # another user's process, and alive


def test_the_lease_expires_where_processes_cannot_be_identified(
    light_platform: OwnPlatform, other: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    other.kill()
    monkeypatch.setattr(lease, "_boot", lambda: "")
    acquire(light_platform, other.name.rpartition(":")[0])

    assert acquire(light_platform, "standby") is None
    light_platform.clock.advance(LASTS)
    assert holder(light_platform) is None
    assert acquire(light_platform, "standby") == 2


def test_machines_whose_clocks_differ_do_not_take_the_lease_from_each_other(
    tmp_path: Path, schema_on_postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_platform(tmp_path, schema_on_postgres, environment=monkeypatch) as platform:
        slow, fast = platform.clock(), platform.clock() + timedelta(minutes=10)
        fence = lease.acquire(platform.database, "slow", now=slow, lasts=LASTS)

        taken = lease.acquire(platform.database, "fast", now=fast, lasts=LASTS)
        lease.renew(platform.database, fence or 0, now=fast, lasts=LASTS)
        lease.release(platform.database, fence or 0, now=slow)
        later = lease.acquire(platform.database, "fast", now=fast, lasts=LASTS)
        back = lease.acquire(platform.database, "slow", now=slow, lasts=LASTS)

    assert (fence, taken, later, back) == (1, None, 2, None)
