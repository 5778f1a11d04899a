"""`falaj up` as real processes: it starts, prints its address, restarts failed parts, and stops cleanly."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
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
from polling import PATIENCE_S, eventually
from processes import children, is_alive

pytestmark = pytest.mark.slow

UP = """import sys
from falaj.apps.supervisor import up
port = int(sys.argv[1])
sys.exit(up(port=None if port < 0 else port))"""
API, CONTROLLER = "falaj.apps.api.server", "falaj.apps.controller.process"


@dataclass
class Running:
    """A platform that was started on `home`, and its output."""

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
        """Return the process id of a part."""
        return next(iter(children(self.process.pid, module)), None)

    def wait_until_ready(self) -> None:
        eventually(lambda: status(self.home).ready)

    def ended(self) -> int:
        """Return the exit code, once it has ended."""
        return self.process.wait(PATIENCE_S)


@contextmanager
def started(home: Path, *, port: int = 0) -> Iterator[Running]:
    """Start a platform on `home`; kill it and its parts at the end if they still run."""
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


# -------------------------------------------------------------------------------------- from start to stop


@pytest.mark.slow
def test_up_prints_its_address_and_signs_its_owner_in(running: Running, tmp_path: Path) -> None:
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
    with fj.connect(running.url) as platform:  # with the token that was saved for the local CLI
        owner = platform.users.whoami().principal.name
        platform.put("kept", b"bytes")
        *_, copied = platform.workflows.watch(platform.blobs.copy("kept", "local", name="twin").id)
        assert copied.state == "done"
    assert link[1] == running.url
    assert credentials.sign_in(running.url, link[2]) == (running.url, owner)
    with pytest.raises(FalajError):
        credentials.sign_in(running.url, link[2])


@pytest.mark.slow
def test_a_home_has_one_platform(running: Running) -> None:
    with pytest.raises(HomeBusy, match=re.escape(running.url)):
        up(running.home, port=0)
    with pytest.raises(HomeBusy, match=re.escape(running.url)):
        fj.open(running.home)

    assert status(running.home).ready


@pytest.mark.slow
def test_a_terminated_platform_stops_cleanly(running: Running) -> None:
    parts = [running.child(API), running.child(CONTROLLER)]

    running.process.send_signal(signal.SIGTERM)

    assert running.ended() == 0
    assert not (running.home / "run.json").exists()
    assert not any(is_alive(pid) for pid in parts if pid)
    assert not status(running.home).running
    with fj.open(running.home) as platform:
        assert platform.verify_audit().ok


@pytest.mark.slow
def test_down_stops_the_platform_and_reports_it(running: Running) -> None:
    assert down(running.home) is True

    assert running.ended() == 0
    assert down(running.home) is False


@pytest.mark.slow
def test_it_stops_cleanly_with_open_connections(running: Running) -> None:
    api, token, where = running.child(API), credentials.token_for(running.url), urlsplit(running.url)
    os.kill(running.child(CONTROLLER), signal.SIGKILL)  # its lease blocks workflows for some seconds
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
        eventually(lambda: not is_alive(api))

    assert running.ended() == 0
    assert "api did not stop" not in running.warned


# ---------------------------------------------------------------------------------------------- killed parts


@pytest.mark.slow
def test_a_killed_api_is_started_again_where_it_was(running: Running) -> None:
    first = running.child(API)

    os.kill(first, signal.SIGKILL)

    eventually(lambda: running.child(API) not in (None, first))
    eventually(lambda: name_at(running.url))
    assert status(running.home).url == running.url


@pytest.mark.slow
def test_a_killed_controller_is_started_again(running: Running) -> None:
    first = running.child(CONTROLLER)

    os.kill(first, signal.SIGKILL)

    eventually(lambda: running.child(CONTROLLER) not in (None, first))
    assert status(running.home).running


@pytest.mark.slow
def test_parts_end_with_a_killed_parent(running: Running) -> None:
    parts = [running.child(API), running.child(CONTROLLER)]
    assert all(parts)

    running.process.kill()

    eventually(lambda: not any(is_alive(pid) for pid in parts))
    assert not status(running.home).running
    with fj.open(running.home) as platform:
        assert platform.verify_audit().ok


@pytest.mark.slow
def test_acknowledged_writes_survive_a_power_cut(home: Path) -> None:
    acknowledged: list[str] = []
    with started(home) as running:
        writer = threading.Thread(target=write_until_cut, args=(running.url, acknowledged))
        writer.start()
        eventually(lambda: len(acknowledged) >= 20)
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
    """Return our user name at `url`, or None if it does not answer."""
    with suppress(FalajError), fj.connect(url) as platform:
        return str(platform.users.whoami().principal.name)
    return None


def write_until_cut(url: str, acknowledged: list[str]) -> None:
    with suppress(FalajError), fj.connect(url) as platform:
        for number in range(10_000):
            acknowledged.append(platform.workspaces.create(f"kept-{number}").name)


# ------------------------------------------------------------------------------- a part that keeps failing


def test_a_controller_that_keeps_failing_is_told_once_and_ends_all_waiting(
    home: Path, tmp_path: Path
) -> None:
    home.mkdir(mode=0o700, parents=True)
    (home / "workflows.db").write_bytes(b"damaged " * 1000)
    (tmp_path / "train.py").write_text("print(1)")
    (tmp_path / "space.toml").write_text("[x]\ntype = 'float'\nlow = 0.0\nhigh = 1.0\n")
    search = ["--space", str(tmp_path / "space.toml"), "--metric", "auc", "--trials", "1"]
    with started(home) as running, fj.connect(running.url) as platform:
        platform.put("kept", b"bytes")
        work = platform.blobs.copy("kept", "local", name="twin").id

        waited = run_on(home, "workflows", "watch", work)  # began before it was known
        sentence = status(home).failing[0]
        trained = run_on(home, "train", str(tmp_path / "train.py"))
        job = platform.jobs.list().items[0].id
        others = [
            run_on(home, "jobs", "wait", job),
            run_on(home, "jobs", "logs", job, "--follow"),
            run_on(home, "tune", str(tmp_path / "train.py"), *search),
        ]
        shown = run_on(home, "status")
        (home / "workflows.db").unlink()
        eventually(lambda: not status(home).failing)
        ended = run_on(home, "workflows", "watch", work)
        again = run_on(home, "jobs", "wait", job)

    log = home / "logs" / "controller.jsonl"
    assert re.fullmatch(
        rf"the controller keeps failing since \S+ \S+ UTC: DatabaseError: .* not a database; its log is {log}",
        sentence,
    )
    for each in (waited, trained, *others):
        assert (each.returncode, each.stderr.splitlines()[-1]) == (1, f"error[process.failed] {sentence}")
    assert (shown.returncode, sentence in shown.stdout) == (1, True)
    assert running.warned.count("\n") == 3  # two ends, and the sentence
    assert running.warned.splitlines()[-1] == f"warning: {sentence}"
    assert '"trace"' in log.read_text()
    assert "the controller runs again" in running.printed
    assert (ended.returncode, again.returncode) == (0, 0)


def run_on(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "falaj", "--home", str(home), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


# ----------------------------------------------------------------------------------------------- failed starts


def test_a_taken_port_is_reported(home: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        started(home, port=taken.getsockname()[1]) as failed,
    ):
        code, words = failed.ended(), failed.warned

    assert code == 1
    assert "Address already in use" in words
    assert "falaj up --port 0 takes a free one" in words
    assert not (home / "run.json").exists()


@pytest.mark.slow
def test_a_second_home_takes_the_next_ports_and_its_clients_find_it(tmp_path: Path) -> None:
    """Without a port in falaj.toml, as in a folder in which nothing was set up."""
    homes = [tmp_path / name / ".falaj" for name in ("one", "two")]
    for home in homes:
        home.parent.mkdir()
        done = run_falaj("--home", str(home), "up", "--detach")
        assert done.returncode == 0, done.stderr
    try:
        found = [status(home) for home in homes]
        for home in homes:
            run_falaj("--home", str(home), "workspaces", "create", home.parent.name)
        shown = [
            run_falaj("--home", str(home), "workspaces", "show", home.parent.name).returncode
            for home in homes
        ]
        refused = run_falaj("--home", str(homes[0]), "workspaces", "show", "two").returncode
        again = run_falaj("--home", str(homes[0]), "up", "--detach")
    finally:
        stopped = [down(home) for home in homes]

    assert len({each.url for each in found}) == 2
    assert shown == [0, 0]
    assert refused == 1
    assert (again.returncode, found[0].url in again.stdout) == (0, True)  # it runs already
    assert stopped == [True, True]
    assert "code=" not in (homes[0] / "logs" / "up.log").read_text()


@pytest.mark.slow
def test_a_model_server_whose_port_is_taken_is_told(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        home.mkdir(mode=0o700, parents=True)
        (home / "falaj.toml").write_text(f"[server]\nport = 0\n[serving]\nport = {port}\n")
        with started(home, port=-1) as running:
            running.wait_until_ready()
            (home / "serving").touch()  # as the first deployment does

            problem = eventually(lambda: status(home).models_problem)

            assert f"cannot listen on 127.0.0.1:{port}" in problem
            assert "set serving.port" in running.warned
    with started(home, port=-1) as running:
        eventually(lambda: status(home).models == f"http://127.0.0.1:{port}")
        assert status(home).models_problem is None


@pytest.mark.slow
def test_a_detached_start_that_fails_says_why(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run_falaj("--home", str(home), "up", "--detach", "--port", port)

    assert done.returncode == 1
    assert f"the API cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_start_that_fails_is_one_error_with_its_fix(home: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run_falaj("--home", str(home), "up", "--port", port)

    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith(f"error[service.unavailable] the API cannot listen on 127.0.0.1:{port}: ")
    assert done.stderr.count("error[") == 1
    assert "fix      stop what listens there, or set server.port" in done.stderr


def test_a_policy_that_does_not_fit_the_schema_is_one_error(home: Path) -> None:
    home.mkdir(mode=0o700, parents=True)
    (home / "odd.cedar").write_text('permit(principal, action == Action::"blobs.fly", resource);')
    (home / "falaj.toml").write_text('policies = ["odd.cedar"]')

    done = run_falaj("--home", str(home), "up", "--port", "0")

    assert done.returncode == 2
    assert done.stderr.startswith("error[policy.invalid] policy file:odd.cedar does not fit the schema")
    assert 'unrecognized action `Action::"blobs.fly"`' in done.stderr
    assert "Traceback" not in done.stderr


def run_falaj(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "falaj", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


# ---------------------------------------------------------------------------- output that nobody can read


FULL, CLOSED, UNREAD, HUNG_UP = "full", "closed", "unread", "hung up"


@contextmanager
def unreadable(kind: str) -> Iterator[int | None]:
    """A descriptor for output that cannot be written to; none where it is to be closed."""
    if kind == CLOSED:
        yield None
        return
    if kind == FULL:
        reading, writing = None, os.open("/dev/full", os.O_WRONLY)
    else:
        reading, writing = os.pipe()
    if kind == HUNG_UP:
        os.close(reading)
        reading = None
    if kind == UNREAD:
        os.set_blocking(writing, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writing, bytes(4096))
        os.set_blocking(writing, True)
    try:
        yield writing
    finally:
        os.close(writing)
        if reading is not None:
            os.close(reading)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FULL, CLOSED, UNREAD, HUNG_UP])
def test_a_platform_that_cannot_print_restarts_its_parts_and_stops(home: Path, kind: str) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    redirect = "exec 1>&- 2>&-; " if kind == CLOSED else ""
    command = ["sh", "-c", f'{redirect}exec "$0" -c "$1" 0', sys.executable, UP]
    with (
        unreadable(kind) as output,
        subprocess.Popen(
            command, env=os.environ | {"FALAJ_HOME": str(home)}, stdout=output, stderr=output
        ) as process,
    ):
        running = Running(home, process)
        try:
            running.wait_until_ready()
            for module in (CONTROLLER, API):
                killed = running.child(module)
                assert killed is not None
                os.kill(killed, signal.SIGKILL)
                eventually(lambda m=module, k=killed: running.child(m) not in (None, k))  # type: ignore[misc]
            running.wait_until_ready()

            process.terminate()

            assert running.ended() == 0
        finally:
            process.kill()
    assert (
        "warning:" not in (home / "lock").read_text()
    )  # no file of the platform was taken for standard error


# ------------------------------------------------------------------------------------------------- readiness


@pytest.mark.slow
def test_a_platform_whose_controller_was_killed_is_not_ready_until_the_next_one_acts(
    running: Running,
) -> None:
    ready, first = f"{running.url}/readyz", status(running.home).controller

    os.kill(running.child(CONTROLLER), signal.SIGKILL)

    # Its lease is valid for at least 6 seconds more: readiness must not depend on the lease alone.
    eventually(lambda: httpx.get(ready).status_code == 503)
    running.wait_until_ready()
    assert status(running.home).controller not in (None, first)
    assert httpx.get(ready).json() == {"ready": True}
