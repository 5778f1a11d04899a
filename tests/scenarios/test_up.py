"""`falaj up` as real processes: it starts, says where it is, survives the death of its parts, and stops cleanly."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

import falaj as fj
from falaj.apps.supervisor import down, status, up
from falaj.errors import FalajError, HomeBusy
from falaj.sdk import credentials
from polling import eventually
from processes import children, is_alive

UP = "import sys; from falaj.apps.supervisor import up; sys.exit(up(port=int(sys.argv[1])))"
READY_S = 30
API, CONTROLLER = "falaj.apps.api.server", "falaj.apps.controller.process"


@dataclass
class Running:
    """A platform that was started on `home`, and what it printed."""

    home: Path
    process: subprocess.Popen[bytes]

    @property
    def printed(self) -> str:
        return (self.home.parent / "printed").read_text()

    @property
    def warned(self) -> str:
        return (self.home.parent / "warned").read_text()

    @property
    def url(self) -> str:
        return re.search(r"http://127\.0\.0\.1:\d+", self.printed)[0]

    def child(self, module: str) -> int | None:
        """The process id of a part."""
        return next(iter(children(self.process.pid, module)), None)

    def wait_until_ready(self) -> None:
        eventually(lambda: status(self.home).ready, within=READY_S, every=0.05)

    def ended(self) -> int:
        """The exit code, once it has ended."""
        return self.process.wait(READY_S)


@contextmanager
def started(home: Path, *, port: int = 0) -> Iterator[Running]:
    """A platform on `home`, killed at the end with all its parts if it is still there."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with (
        (home.parent / "printed").open("w") as out,
        (home.parent / "warned").open("w") as err,
        subprocess.Popen(
            [sys.executable, "-c", UP, str(port)],
            env=os.environ | {"FALAJ_HOME": str(home)},
            stdout=out,
            stderr=err,
        ) as process,
    ):
        running = Running(home, process)
        try:
            eventually(
                lambda: "five minutes" in running.printed or process.poll() is not None,
                within=READY_S,
                every=0.05,
            )
            yield running
        finally:
            parts = [running.child(API), running.child(CONTROLLER)]
            for pid in [process.pid, *(part for part in parts if part)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def _own_config_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.delenv("FALAJ_TOKEN", raising=False)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def running(home: Path) -> Iterator[Running]:
    with started(home) as platform:
        platform.wait_until_ready()
        yield platform


# -------------------------------------------------------------------------------------------------- a life


def test_it_says_where_it_is_and_lets_its_owner_in(running: Running, tmp_path: Path) -> None:
    link = re.search(r"sign in +(\S+)/#code=(\S+)", running.printed)
    file = tmp_path / "config" / "credentials.json"

    found = status(running.home)

    assert (found.running, found.ready, found.url, found.pid) == (
        True,
        True,
        running.url,
        running.process.pid,
    )
    assert found.controller
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert httpx.get(f"{running.url}/readyz").json() == {"ready": True}
    assert httpx.get(f"{running.url}/api/v1/users/whoami").status_code == 401
    with fj.connect(running.url) as platform:  # by the token that was saved for the local command line
        owner = platform.users.whoami().principal.name
        platform.put("kept", b"bytes")
        *_, copied = platform.workflows.watch(platform.blobs.copy("kept", "local", name="twin").id)
        assert copied.state == "done"
    assert link[1] == running.url
    assert credentials.sign_in(running.url, link[2]) == owner
    with pytest.raises(FalajError):
        credentials.sign_in(running.url, link[2])


def test_a_home_has_one_platform(running: Running) -> None:
    with pytest.raises(HomeBusy, match=re.escape(running.url)):
        up(running.home, port=0)
    with pytest.raises(HomeBusy, match=re.escape(running.url)):
        fj.open(running.home)

    assert status(running.home).ready


def test_a_terminated_platform_stops_cleanly(running: Running) -> None:
    parts = [running.child(API), running.child(CONTROLLER)]

    running.process.send_signal(signal.SIGTERM)

    assert running.ended() == 0
    assert not (running.home / "run.json").exists()
    assert not any(is_alive(pid) for pid in parts if pid)
    assert not status(running.home).running
    with fj.open(running.home) as platform:
        assert platform.verify_audit().ok


def test_down_stops_it_and_says_so(running: Running) -> None:
    assert down(running.home) is True

    assert running.ended() == 0
    assert down(running.home) is False


def test_it_stops_cleanly_under_callers_who_stay(running: Running) -> None:
    api, token, where = running.child(API), credentials.token_for(running.url), urlsplit(running.url)
    os.kill(running.child(CONTROLLER), signal.SIGKILL)  # its lease outlives it: for seconds no work is done
    with fj.connect(running.url) as platform:
        platform.put("kept", b"bytes")
        work = platform.blobs.copy("kept", "local", name="twin").id
    with (
        socket.create_connection((where.hostname, where.port)) as uploads,
        httpx.Client(headers={"Authorization": f"Bearer {token}"}) as client,
        client.stream("GET", f"{running.url}/api/v1/workflows/watch?work={work}"),
    ):
        head = f"POST /api/v1/blobs/upload HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        uploads.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + b"5\r\nbytes\r\n")

        running.process.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        eventually(lambda: not is_alive(api), within=READY_S, every=0.1)

    assert time.monotonic() - asked < 8  # after ten seconds the parent kills it
    assert running.ended() == 0


# -------------------------------------------------------------------------------------------- death of parts


def test_a_killed_api_is_started_again_where_it_was(running: Running) -> None:
    first = running.child(API)

    os.kill(first, signal.SIGKILL)

    eventually(lambda: running.child(API) not in (None, first), within=READY_S)
    eventually(lambda: name_at(running.url), within=READY_S, every=0.05)
    assert status(running.home).url == running.url


def test_a_killed_controller_is_started_again(running: Running) -> None:
    first = running.child(CONTROLLER)

    os.kill(first, signal.SIGKILL)

    eventually(lambda: running.child(CONTROLLER) not in (None, first), within=READY_S)
    assert status(running.home).running


def test_parts_end_with_a_killed_parent(running: Running) -> None:
    parts = [running.child(API), running.child(CONTROLLER)]
    assert all(parts)

    running.process.kill()

    eventually(lambda: not any(is_alive(pid) for pid in parts), within=READY_S, every=0.05)
    assert not status(running.home).running
    with fj.open(running.home) as platform:
        assert platform.verify_audit().ok


def test_what_was_acknowledged_outlives_a_power_cut(home: Path) -> None:
    acknowledged: list[str] = []
    with started(home) as running:
        writer = threading.Thread(target=write_until_cut, args=(running.url, acknowledged))
        writer.start()
        eventually(lambda: len(acknowledged) >= 20, within=READY_S)
        parts = [running.child(API), running.child(CONTROLLER)]
        for pid in (running.process.pid, *parts):
            os.kill(pid, signal.SIGKILL)
        writer.join()

    with started(home) as again, fj.connect(again.url) as platform:
        found = {each.name for each in platform.workspaces.list(limit=1000).items}
        check = platform.verify_audit()

    assert set(acknowledged) <= found
    assert check.ok, check.problems


def name_at(url: str) -> str | None:
    """Who we are at `url`, if it answers."""
    with suppress(FalajError), fj.connect(url) as platform:
        return str(platform.users.whoami().principal.name)
    return None


def write_until_cut(url: str, acknowledged: list[str]) -> None:
    with suppress(FalajError), fj.connect(url) as platform:
        for number in range(10_000):
            acknowledged.append(platform.workspaces.create(f"kept-{number}").name)


# ------------------------------------------------------------------------------------------ a start that fails


def test_a_port_that_is_taken_is_told(home: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        started(home, port=taken.getsockname()[1]) as failed,
    ):
        code, words = failed.ended(), failed.warned

    assert code == 1
    assert "the API did not start" in words
    assert "Address already in use" in words
    assert not (home / "run.json").exists()


# --------------------------------------------------------------------------------- a controller that is dead


def test_a_platform_whose_controller_was_killed_is_not_ready_until_the_next_one_acts(
    running: Running,
) -> None:
    ready, first = f"{running.url}/readyz", status(running.home).controller

    os.kill(running.child(CONTROLLER), signal.SIGKILL)

    # The lease that it leaves goes on for 6 seconds at least: whoever only looks at that says ready until then.
    eventually(lambda: httpx.get(ready).status_code == 503, within=5, every=0.01)
    running.wait_until_ready()
    assert status(running.home).controller not in (None, first)
    assert httpx.get(ready).json() == {"ready": True}
