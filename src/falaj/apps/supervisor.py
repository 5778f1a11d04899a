"""`falaj up`: runs API, controller and model server under one parent, which restarts and stops them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from falaj.assembly.config import read_config
from falaj.assembly.home import Home, find_home, open_home
from falaj.errors import FalajError, InvalidInput, Unavailable
from falaj.records.config import ServerConfig, ServingConfig
from falaj.records.places import default_home
from falaj.records.platform import PlatformStatus
from falaj.sdk import credentials

START_S = 60.0
STOP_S = 10.0
BACKOFF_S = (0.1, 1.0, 5.0)
STEADY_S = 60.0
"""After running this long, a child counts as recovered."""


def up(home_path: Path | None = None, *, port: int | None = None, bind: str | None = None) -> int:
    """Run the platform of a home in the foreground until it is stopped; return the exit code."""
    home = open_home(home_path)
    with home.lock():
        server = read_config(home.toml).server
        given = {key: value for key, value in (("port", port), ("bind", bind)) if value is not None}
        server = _changed(server, given)
        serving = read_config(home.toml).serving
        if server.port == 0:
            serving = serving.model_copy(update={"port": 0})
        return Supervisor(home, server, serving).run()


def down(home_path: Path | None = None) -> bool:
    """Stop the platform that runs on a home, and wait for its end; return false if none runs."""
    home = find_home(home_path)
    pid = home.platform().get("pid") if home is not None else None
    if home is None or pid is None or not home.is_held():
        return False
    with suppress(ProcessLookupError):  # it may have ended meanwhile
        os.kill(int(pid), signal.SIGTERM)
    deadline = time.monotonic() + 2 * STOP_S
    while home.is_held():
        if time.monotonic() > deadline:
            raise Unavailable(f"the platform (process {pid}) does not stop; it is safe to kill it")
        time.sleep(0.05)
    return True


def status(home_path: Path | None = None) -> PlatformStatus:
    """Return what runs on a home."""
    home = find_home(home_path)
    facts = home.platform() if home is not None and home.is_held() else {}
    if home is None or "url" not in facts:
        return PlatformStatus(home=str((home_path or default_home()).absolute()), running=False)
    found = PlatformStatus(
        home=str(home.path), running=True, url=facts["url"], pid=facts["pid"], models=facts.get("models")
    )
    from falaj.sdk.remote import connect

    with suppress(FalajError), connect(facts["url"]) as platform:
        remote = platform.platform.status()
        more = {
            "version": remote.version,
            "controller": remote.controller,
            "ready": remote.controller is not None,
        }
        return found.model_copy(update=more)
    return found


@dataclass
class ChildProcess:
    """A process of the platform; it ends when our end of its standard input closes."""

    name: str
    command: list[str]
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    failures: int = 0
    start_at: float = 0.0
    started_at: float = 0.0

    def start(self, *, ready: int | None = None) -> None:
        extra = {} if ready is None else {"FALAJ_READY_FD": str(ready)}
        extra |= {"FALAJ_RESTART": "1"} if self.failures else {}
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", *self.command],
            env=self.environment | extra,
            stdin=subprocess.PIPE,
            pass_fds=() if ready is None else (ready,),
            start_new_session=True,
        )

    def stop(self, *, by: float) -> None:
        if self.process is None:
            return
        with suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
            self.process.terminate()
        try:
            self.process.wait(max(0.1, by - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class Supervisor:
    home: Home
    server: ServerConfig
    serving: ServingConfig
    stopping: bool = False
    children: list[ChildProcess] = field(default_factory=list)
    running: dict[str, Any] = field(default_factory=dict)
    model_server: ChildProcess | None = None
    ready_pipe: int | None = None
    """The pipe on which a starting model server reports its address."""

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        environment = os.environ | {
            "FALAJ_HOME": str(self.home.path),
            "FALAJ_CONFIG_DIR": str(self.home.config_dir),
        }
        where = [self.server.bind, str(self.server.port)]
        api = ChildProcess("api", ["falaj.apps.api.server", *where], environment)
        controller = ChildProcess("controller", ["falaj.apps.controller.process"], environment)
        self.children = [api, controller]
        serving = ["falaj.apps.model_server", self.serving.bind, str(self.serving.port)]
        self.model_server = ChildProcess("the model server", serving, environment)
        try:
            facts = self._start_api(api)
            if facts is None:
                return self._fail_to_start()
            controller.start()
            self._print_address(facts)
            self._watch()
        finally:
            self._stop_children()
            self.home.running.unlink(missing_ok=True)
        return 0

    def _start_api(self, api: ChildProcess) -> dict[str, Any] | None:
        """Start the API and wait for its address; return none if it ended instead."""
        reading, writing = os.pipe()
        api.start(ready=writing)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            waits_until = time.monotonic() + START_S
            while not self.stopping and time.monotonic() < waits_until:
                if select.select([pipe], [], [], 0.1)[0]:
                    text = pipe.read()
                    if text:
                        return self._publish(json.loads(text))
                    break
        return None

    def _fail_to_start(self) -> int:
        if self.stopping:
            return 0
        raise Unavailable(f"the API did not start; see {self.home.logs / 'api.jsonl'} and the lines above")

    def _publish(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Publish the address of the platform, and save the token for the local command line."""
        if "token" in facts:
            credentials.save(facts["url"], facts.pop("token"))
        self._write_facts(url=facts["url"], pid=os.getpid())
        port = facts["url"].rpartition(":")[2]
        self.children[0].command[-1] = port  # a restart uses the same port
        return facts

    def _write_facts(self, **facts: Any) -> None:
        """Write facts about the running platform to a file for other processes of this home."""
        self.running |= facts
        draft = self.home.running.with_suffix(".new")
        draft.write_text(json.dumps(self.running))
        draft.rename(self.home.running)

    def _print_address(self, facts: dict[str, Any]) -> None:
        print(f"Falaj runs at {facts['url']} (home {self.home.path}). Stop it: Ctrl-C, or falaj down")
        if "code" in facts:
            print(f"  sign in  {facts['url']}/#code={facts['code']}")
            print(
                "           valid once, for five minutes; get another: falaj tokens sign-in-link", flush=True
            )
        else:
            print(
                "  sign in  ask an administrator for a link: falaj tokens sign-in-link --user YOU", flush=True
            )

    def _watch(self) -> None:
        """Restart children that have died, with backoff, until we are stopped."""
        while not self.stopping:
            now = time.monotonic()
            for child in self.children:
                if child.process is not None and child.process.poll() is not None:
                    self._schedule_restart(child, now)
                elif child.process is None and now >= child.start_at:
                    self._restart(child)
            self._run_model_server()
            time.sleep(0.05)

    def _run_model_server(self) -> None:
        """Start the model server once something is deployed, and read its address when it is ready."""
        server = self.model_server
        if server is not None and server not in self.children and self.home.serving.exists():
            self.children.append(server)
        if (
            server is not None
            and self.ready_pipe is not None
            and select.select([self.ready_pipe], [], [], 0)[0]
        ):
            with os.fdopen(self.ready_pipe) as pipe:
                self.ready_pipe, text = None, pipe.read()
            if text:
                self._write_facts(models=json.loads(text)["url"])
                server.command[-1] = self.running["models"].rpartition(":")[2]  # a restart uses the same port

    def _start_model_server(self, child: ChildProcess) -> None:
        """Start it without waiting; it reports its address when it is ready."""
        if self.ready_pipe is not None:
            os.close(self.ready_pipe)
        self.ready_pipe, writing = os.pipe()
        child.start(ready=writing)
        os.close(writing)

    def _schedule_restart(self, child: ChildProcess, now: float) -> None:
        code = child.process.returncode if child.process else None
        child.process = None
        if now - child.started_at > STEADY_S:
            child.failures = 0
        child.start_at = now + BACKOFF_S[min(child.failures, len(BACKOFF_S) - 1)]
        child.failures += 1
        print(f"warning: {child.name} ended (code {code}); it is restarted", file=sys.stderr, flush=True)

    def _restart(self, child: ChildProcess) -> None:
        if child is self.model_server:
            self._start_model_server(child)
            return
        if child.name != "api":
            child.start()
            return
        facts = self._start_api(child)
        if facts is None and child.process is not None and not self.stopping:
            child.stop(by=time.monotonic())

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stopping = True

    def _stop_children(self) -> None:
        by = time.monotonic() + STOP_S
        for child in reversed(self.children):
            child.stop(by=by)


def _changed(server: ServerConfig, given: dict[str, Any]) -> ServerConfig:
    """Return `server` with the options of the command line, validated as a whole."""
    from pydantic import ValidationError

    try:
        return ServerConfig.model_validate(server.model_dump() | given)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise InvalidInput.at("--bind/--port", given=given, allowed=message) from None
