"""`falaj up`: API, controller and model server under one parent, which restarts what dies and stops all cleanly."""

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
"""A child that ran this long had recovered."""


def up(home_path: Path | None = None, *, port: int | None = None, bind: str | None = None) -> int:
    """Run the platform of a home in the foreground until it is told to stop; the exit code."""
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
    """Stop the platform that runs on a home, and wait until it has; false if none runs."""
    home = find_home(home_path)
    pid = home.platform().get("pid") if home is not None else None
    if home is None or pid is None or not home.is_held():
        return False
    with suppress(ProcessLookupError):  # it may just have ended by itself
        os.kill(int(pid), signal.SIGTERM)
    deadline = time.monotonic() + 2 * STOP_S
    while home.is_held():
        if time.monotonic() > deadline:
            raise Unavailable(f"the platform (process {pid}) does not stop; kill it, nothing is lost by that")
        time.sleep(0.05)
    return True


def status(home_path: Path | None = None) -> PlatformStatus:
    """What runs on a home."""
    home = find_home(home_path)
    told = home.platform() if home is not None and home.is_held() else {}
    if home is None or "url" not in told:
        return PlatformStatus(home=str((home_path or default_home()).absolute()), running=False)
    found = PlatformStatus(
        home=str(home.path), running=True, url=told["url"], pid=told["pid"], models=told.get("models")
    )
    from falaj.sdk.remote import connect

    with suppress(FalajError), connect(told["url"]) as platform:
        facts = platform.platform.status()
        more = {
            "version": facts.version,
            "controller": facts.controller,
            "ready": facts.controller is not None,
        }
        return found.model_copy(update=more)
    return found


@dataclass
class ChildProcess:
    """A process of the platform. It ends when our end of its standard input closes."""

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
    hearing: int | None = None
    """The pipe by which a model server that starts will tell where it is."""

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
            told = self._start_api(api)
            if told is None:
                return self._gave_up()
            controller.start()
            self._say_where(told)
            self._watch()
        finally:
            self._stop_children()
            self.home.running.unlink(missing_ok=True)
        return 0

    def _start_api(self, api: ChildProcess) -> dict[str, Any] | None:
        """Start the API and wait until it tells where it is; none if it ended instead."""
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

    def _gave_up(self) -> int:
        if self.stopping:
            return 0
        raise Unavailable(
            f"the API did not start; {self.home.logs / 'api.jsonl'} and the lines above say why"
        )

    def _publish(self, told: dict[str, Any]) -> dict[str, Any]:
        """Write down where the platform is, and keep the token for the local command line."""
        if "token" in told:
            credentials.save(told["url"], told.pop("token"))
        self._tell_others(url=told["url"], pid=os.getpid())
        port = told["url"].rpartition(":")[2]
        self.children[0].command[-1] = port  # a restart listens where it was
        return told

    def _tell_others(self, **facts: Any) -> None:
        """Write down what other processes of this home may want to know."""
        self.running |= facts
        draft = self.home.running.with_suffix(".new")
        draft.write_text(json.dumps(self.running))
        draft.rename(self.home.running)

    def _say_where(self, told: dict[str, Any]) -> None:
        print(f"Falaj runs at {told['url']} (home {self.home.path}). Stop it: Ctrl-C, or falaj down")
        if "code" in told:
            print(f"  sign in  {told['url']}/#code={told['code']}")
            print("           once, within five minutes; another: falaj tokens sign-in-link", flush=True)
        else:
            print(
                "  sign in  ask an administrator for a link: falaj tokens sign-in-link --user YOU", flush=True
            )

    def _watch(self) -> None:
        """Start again what has died, more slowly each time, until we are told to stop."""
        while not self.stopping:
            now = time.monotonic()
            for child in self.children:
                if child.process is not None and child.process.poll() is not None:
                    self._mourn(child, now)
                elif child.process is None and now >= child.start_at:
                    self._revive(child)
            self._look_after_models()
            time.sleep(0.05)

    def _look_after_models(self) -> None:
        """Have a model server once something was deployed: until then it costs nothing."""
        server = self.model_server
        if server is not None and server not in self.children and self.home.serving.exists():
            self.children.append(server)
        if server is not None and self.hearing is not None and select.select([self.hearing], [], [], 0)[0]:
            with os.fdopen(self.hearing) as pipe:
                self.hearing, text = None, pipe.read()
            if text:
                self._tell_others(models=json.loads(text)["url"])
                server.command[-1] = self.running["models"].rpartition(":")[2]  # a restart listens there

    def _start_models(self, child: ChildProcess) -> None:
        """It tells where it is when it is ready; nobody waits for that."""
        if self.hearing is not None:
            os.close(self.hearing)
        self.hearing, writing = os.pipe()
        child.start(ready=writing)
        os.close(writing)

    def _mourn(self, child: ChildProcess, now: float) -> None:
        code = child.process.returncode if child.process else None
        child.process = None
        if now - child.started_at > STEADY_S:
            child.failures = 0
        child.start_at = now + BACKOFF_S[min(child.failures, len(BACKOFF_S) - 1)]
        child.failures += 1
        print(f"warning: {child.name} ended (code {code}); it is started again", file=sys.stderr, flush=True)

    def _revive(self, child: ChildProcess) -> None:
        if child is self.model_server:
            self._start_models(child)
            return
        if child.name != "api":
            child.start()
            return
        told = self._start_api(child)
        if told is None and child.process is not None and not self.stopping:
            child.stop(by=time.monotonic())

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stopping = True

    def _stop_children(self) -> None:
        by = time.monotonic() + STOP_S
        for child in reversed(self.children):
            child.stop(by=by)


def _changed(server: ServerConfig, given: dict[str, Any]) -> ServerConfig:
    """`server` with what the command line says, checked again as a whole."""
    from pydantic import ValidationError

    try:
        return ServerConfig.model_validate(server.model_dump() | given)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise InvalidInput.at("--bind/--port", given=given, allowed=message) from None
