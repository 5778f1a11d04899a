"""`falaj up`: runs API, controller, console and model server under one parent, which restarts and stops them."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from falaj.apps.api.forwarded_origin import VARIABLE as ORIGIN_KEY
from falaj.apps.child_process import CAUSE_FD, LOG
from falaj.apps.console.settings import ConsoleSettings, console_environment
from falaj.apps.http_server import listen
from falaj.apps.message_writer import MessageWriter, open_standard_streams
from falaj.apps.model_replicas import ModelReplicas
from falaj.apps.ports import spell_port
from falaj.assembly.config import read_config
from falaj.assembly.home import Home, find_home, open_home
from falaj.control.repeated_failures import REPEATS, RepeatedFailures, describe_cause
from falaj.errors import FalajError, InvalidInput, Unavailable, rebuild
from falaj.records.config import ServerConfig, ServingConfig
from falaj.records.control.console import ConsoleConfig
from falaj.records.control.tls import is_loopback
from falaj.records.places import default_home
from falaj.records.platform import PlatformStatus
from falaj.records.record import utc_now
from falaj.sdk import credentials

START_S = 60.0
STOP_S = 10.0


def up(home_path: Path | None = None, *, port: int | None = None, bind: str | None = None) -> int:
    """Run the platform of a home in the foreground until it is stopped; return the exit code."""
    open_standard_streams()
    home = open_home(home_path)
    with home.lock():
        config = read_config(home.toml)
        given = {key: value for key, value in (("port", port), ("bind", bind)) if value is not None}
        server, serving, console = _changed(config.server, given), config.serving, config.console
        if server.port == 0:
            unset = {"port", "grpc_port"} - config.serving.model_fields_set
            serving = serving.model_copy(update=dict.fromkeys(unset, 0))
            unset = {"port"} - config.console.model_fields_set
            console = console.model_copy(update=dict.fromkeys(unset, 0))
        fixed = {"server"} if is_fixed(config.server, server.bind) or port is not None else set()
        fixed |= {"serving"} if is_fixed(config.serving, serving.bind) else set()
        fixed |= {"grpc"} if is_fixed(config.serving, serving.bind, "grpc_port") else set()
        fixed |= {"console"} if is_fixed(config.console, console.bind) else set()
        return Supervisor(home, server, serving, frozenset(fixed), console).run()


def is_fixed(config: ServerConfig | ServingConfig | ConsoleConfig, bind: str, name: str = "port") -> bool:
    """Tell whether others rely on a port: falaj.toml sets it, or other machines can reach it."""
    return name in config.model_fields_set or not is_loopback(bind)


def up_detached(home_path: Path | None = None, *, options: Sequence[str] = ()) -> PlatformStatus:
    """Start the platform of a home in the background, unless one runs, and wait until it has an address.

    `options` are those of `falaj up`. Its warnings are written to up.log among the logs of the home; FalajError with
    what it said if it ends instead.
    """
    home = open_home(home_path)
    if "url" in home.platform():
        return status(home.path)
    with home.lock():  # HomeBusy, where another process has the home open, is told here
        pass
    log = home.logs / "up.log"
    command = [sys.executable, "-m", "falaj", "--home", str(home.path), "up", *options]
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the sign-in code belongs in no log
            stderr=output,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_S
    while home.platform().get("pid") != process.pid:
        if process.poll() is not None:
            raise Unavailable(f"the platform did not start:\n{log.read_text(errors='replace').rstrip()}")
        if time.monotonic() > deadline:
            raise Unavailable(f"the platform (process {process.pid}) has no address yet; see {log}")
        time.sleep(0.05)
    return status(home.path)


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
        home=str(home.path),
        running=True,
        url=facts["url"],
        console=facts.get("console"),
        pid=facts["pid"],
        models=facts.get("models"),
        models_grpc=facts.get("models_grpc"),
        models_problem=facts.get("models_problem"),
        replicas=facts.get("replicas"),
        failing=tuple(facts.get("failing", {}).values()),
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

    failures: RepeatedFailures
    command: list[str]
    environment: dict[str, str]
    inherits: tuple[int, ...] = ()
    """Open files that it gets, at every start."""
    process: subprocess.Popen[bytes] | None = None
    cause: int = -1
    """Where it writes why it ends."""
    start_at: float = 0.0
    started_at: float = 0.0

    @property
    def name(self) -> str:
        return self.failures.name

    def start(self, *, output: int, ready: int | None = None) -> None:
        """Start it; it writes to `output`, and reports to `ready` when it is."""
        self.started_at = time.monotonic()
        self.cause, writing = os.pipe()
        os.set_blocking(self.cause, False)
        extra = {LOG: str(self.failures.log), CAUSE_FD: str(writing)}
        extra |= {} if ready is None else {"FALAJ_READY_FD": str(ready)}
        extra |= {"FALAJ_RESTART": "1"} if self.failures.count else {}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "falaj.apps.child_process", *self.command],
                env=self.environment | extra,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(*self.inherits, writing, *(() if ready is None else (ready,))),
                start_new_session=True,
            )
        finally:
            os.close(writing)

    def stop(self, *, by: float) -> str:
        """End it by a monotonic time, unless it has ended; return why it ended."""
        if self.process is not None:
            with suppress(OSError):
                self.process.stdin.close()  # type: ignore[union-attr]
                self.process.terminate()
            try:
                self.process.wait(max(0.1, by - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self._take_cause()

    def _take_cause(self) -> str:
        """Return the error that it reported, else its exit status or signal."""
        said = b""
        if self.cause >= 0:
            with suppress(OSError):
                said = os.read(self.cause, 4096)
            os.close(self.cause)
        code = 0 if self.process is None else self.process.returncode
        self.process, self.cause = None, -1
        if said:
            return said.decode(errors="replace")
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"


@dataclass
class Supervisor:
    home: Home
    server: ServerConfig
    serving: ServingConfig
    fixed_ports: frozenset[str] = frozenset()
    """Of `server`, `serving`, `grpc` and `console`, those whose port somebody chose: the others may take another."""
    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    stopping: bool = False
    messages: MessageWriter = field(init=False)
    children: list[ChildProcess] = field(default_factory=list)
    running: dict[str, Any] = field(default_factory=dict)
    models: ModelReplicas | None = None
    _listeners: list[socket.socket] = field(default_factory=list)
    _origin_key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    is_published: bool = True
    """Whether the file for other processes of this home has all facts; else it is written again."""

    def run(self) -> int:
        self.messages = MessageWriter()
        try:
            return self._run()
        finally:
            self.messages.close()

    def _run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        environment = os.environ | {
            "FALAJ_HOME": str(self.home.path),
            "FALAJ_CONFIG_DIR": str(self.home.config_dir),
        }
        where = [self.server.bind, self._port("server", self.server.port)]
        key = {ORIGIN_KEY: self._origin_key}
        api = self._child("API", ["falaj.apps.api.server", *where], environment | key)
        controller = self._child("controller", ["falaj.apps.controller.process"], environment)
        self.children = [api, controller]
        self.models = self._model_replicas()
        try:
            facts = self._start_api(api)
            if facts is None:
                return self._fail_to_start(api)
            controller.start(output=self.messages.pipe)
            self._start_console(facts["url"])
            self._print_address(facts)
            self._watch()
        finally:
            self._stop_children()
            for listener in self._listeners:
                listener.close()
            self.home.running.unlink(missing_ok=True)
        return 0

    def _start_console(self, api: str) -> None:
        """Start the console. It gets a listening socket, which lasts while it is restarted."""
        if not self.console.enabled or os.environ.get("FALAJ_CONSOLE") == "off":
            return
        try:
            listener = listen(self.console.bind, self._port("console", self.console.port), section="console")
        except Unavailable as error:  # the rest of the platform goes on
            self.messages.warn(str(error))
            return
        self._listeners.append(listener)
        settings = ConsoleSettings.of(
            self.console,
            self.server,
            api=api,
            listener=listener,
            origin_key=self._origin_key,
            log=self.home.logs / "console.jsonl",
        )
        environment = console_environment(settings)
        child = self._child("console", ["falaj.apps.console.process"], environment)
        child.inherits = (listener.fileno(),)
        self.children.append(child)
        child.start(output=self.messages.pipe)
        self._write_facts(console=settings.url)

    def _child(self, name: str, command: list[str], environment: dict[str, str]) -> ChildProcess:
        log = self.home.logs / f"{name.lower()}.jsonl"
        return ChildProcess(RepeatedFailures(name, log), command, environment)

    def _model_replicas(self) -> ModelReplicas:
        scheme = "http" if (self.serving.tls or self.server.tls) is None else "https"
        port, grpc = self._port("serving", self.serving.port), self.serving.grpc_port
        grpc_port = None if grpc == "off" else self._port("grpc", grpc)
        return ModelReplicas(
            self.home, self.serving, port, scheme, self.messages, self._write_facts, grpc_port=grpc_port
        )

    def _port(self, name: str, port: int) -> str:
        return spell_port(port, fixed=name in self.fixed_ports)

    def _start_api(self, api: ChildProcess) -> dict[str, Any] | None:
        """Start the API and wait for its address; return none if it ended instead. Raise the error that it reports."""
        reading, writing = os.pipe()
        try:
            api.start(output=self.messages.pipe, ready=writing)
        finally:
            os.close(writing)
        with os.fdopen(reading) as pipe:
            waits_until = time.monotonic() + START_S
            while not self.stopping and time.monotonic() < waits_until:
                if select.select([pipe], [], [], 0.1)[0]:
                    text = pipe.read()
                    if text:
                        return self._publish(check_start(json.loads(text)))
                    break
        return None

    def _fail_to_start(self, api: ChildProcess) -> int:
        if self.stopping:
            return 0
        cause = api.stop(by=time.monotonic() + STOP_S)
        raise Unavailable(f"the API did not start: {cause}; its log is {api.failures.log}")

    def _publish(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Publish the address of the platform, and save the token for the local command line."""
        if "token" in facts:
            until = datetime.fromisoformat(facts.pop("token_until"))
            credentials.save(facts["url"], facts.pop("token"), expires_at=until)
        self._write_facts(url=facts["url"], pid=os.getpid())
        if not self.is_published and not self.children[0].failures.count:
            raise Unavailable(f"{self.home.running} could not be written; see the lines above")
        self.children[0].command[-1] = str(_port_of(facts["url"]))  # a restart uses the same port
        return facts

    def _write_facts(self, **facts: Any) -> None:
        """Write facts about the running platform to a file for other processes of this home, if there are new ones."""
        if self.is_published and self.running == self.running | facts:
            return
        self.running |= facts
        draft = self.home.running.with_suffix(".new")
        try:
            draft.write_text(json.dumps(self.running))
            draft.rename(self.home.running)
            self.is_published = True
        except OSError as error:  # a full disk: tried again
            if self.is_published:
                self.messages.warn(f"{self.home.running} could not be written ({error}); retrying")
            self.is_published = False

    def _print_address(self, facts: dict[str, Any]) -> None:
        say = self.messages.say
        say(f"Falaj runs at {facts['url']} (home {self.home.path}). Stop it: Ctrl-C, or falaj down")
        if self.server.port not in (0, _port_of(facts["url"])):
            say(f"  port     {self.server.port} is in use, so another was chosen; server.port sets it")
        if (console := self.running.get("console")) is not None:
            say(f"  console  {console}")
        if "code" in facts:
            say(f"  sign in  {console or facts['url']}/#code={facts['code']}")
            say("           valid once, for five minutes; get another: falaj tokens sign-in-link")
        else:
            say("  sign in  ask an administrator for a link: falaj tokens sign-in-link --user YOU")

    def _watch(self) -> None:
        """Restart children that have died, with backoff, until we are stopped."""
        while not self.stopping:
            now = time.monotonic()
            for child in self.children:
                if child.process is None:
                    if now >= child.start_at:
                        self._restart(child)
                elif child.process.poll() is not None:
                    self._schedule_restart(child, child.stop(by=now))
                elif child.failures.is_recovered(ran_s=now - child.started_at):
                    child.failures.clear()
                    self.messages.say(f"the {child.name} runs again")
                    self._publish_failing()
            if self.models is not None:
                self.models.tick(now)
            if not self.is_published:
                self._write_facts()
            time.sleep(0.05)

    def _schedule_restart(self, child: ChildProcess, cause: str) -> None:
        """Start a child again after a pause; what ends it is said in a line, and no more once it keeps failing."""
        now, before = time.monotonic(), child.failures.sentence
        child.start_at = now + child.failures.add(cause, ran_s=now - child.started_at, now=utc_now())
        sentence = child.failures.sentence
        if sentence != before and sentence is not None:
            self.messages.warn(sentence)
        elif child.failures.repeats < REPEATS:
            self.messages.warn(f"the {child.name} ended ({cause}); it is restarted")
        self._publish_failing()

    def _publish_failing(self) -> None:
        kept = ((child.name, child.failures.sentence) for child in self.children)
        self._write_facts(failing={name: sentence for name, sentence in kept if sentence})

    def _restart(self, child: ChildProcess) -> None:
        """Start a child again. What keeps it from starting counts as an end."""
        try:
            self._start_again(child)
        except (OSError, FalajError) as error:
            child.stop(by=time.monotonic())
            self._schedule_restart(child, describe_cause(error))

    def _start_again(self, child: ChildProcess) -> None:
        if child is not self.children[0]:
            child.start(output=self.messages.pipe)
            return
        facts = self._start_api(child)
        if facts is None and not self.stopping:
            self._schedule_restart(child, child.stop(by=time.monotonic()))

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stopping = True

    def _stop_children(self) -> None:
        by = time.monotonic() + STOP_S
        if self.models is not None:
            self.models.close(by=by)
        for child in reversed(self.children):
            if child.stop(by=by) == f"killed by signal {signal.SIGKILL:d}":
                self.messages.warn(f"the {child.name} did not stop in {STOP_S:g} s; it was killed")


def check_start(facts: dict[str, Any]) -> dict[str, Any]:
    """Return what the API reports to its parent, or raise the error that kept it from starting."""
    if "error" in facts:
        raise rebuild(**facts["error"])
    return facts


def _port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def _changed(server: ServerConfig, given: dict[str, Any]) -> ServerConfig:
    """Return `server` with the options of the command line, validated as a whole."""
    from pydantic import ValidationError

    try:
        return ServerConfig.model_validate(server.model_dump() | given)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise InvalidInput.at("--bind/--port", given=given, allowed=message) from None
