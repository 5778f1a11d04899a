"""The model server under its parent: its port, how it is restarted where it cannot start, scaled and replaced."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from falaj.apps import model_replicas
from falaj.apps.model_replicas import ModelReplicas
from falaj.assembly.home import Home, open_home
from falaj.drivers.processes.replicas import ProcessReplicas
from falaj.records.config import ServingConfig
from falaj.records.control.replicas import RecentLoad, Replica, ReplicaConfig, ReplicaState
from polling import PATIENCE_S

UNABLE = """
import json, os
facts = json.loads(os.environ["FALAJ_REPLICA_SOCKETS"])
os.write(facts["reports"], b'{"problem": "the model server lacks memory"}\\n')
raise SystemExit(1)
"""


class Messages:
    """The messages of the parent."""

    def __init__(self) -> None:
        self.pipe = 2
        self.said: list[str] = []
        self.warned: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def warn(self, line: str) -> None:
        self.warned.append(line)


class SimulatedReplicas:
    """Replicas that become ready when the test says so, with a load of its choice."""

    def __init__(self) -> None:
        self.found: dict[str, Replica] = {}
        self.waiting = False
        self.sockets: Mapping[str, Sequence[socket.socket]] = {}

    def start(self, *, replaces: str | None = None) -> str:
        name = str(len(self.found) + 1)
        self.found[name] = Replica(name=name, state=ReplicaState.STARTING, age_s=1.0)
        return name

    def set(self, name: str, **facts: Any) -> None:
        self.found[name] = self.found[name].model_copy(update=facts)

    def ready(self, load: RecentLoad | None = None) -> None:
        for name, each in self.found.items():
            if each.state in (ReplicaState.STARTING, ReplicaState.READY):
                self.set(name, state=ReplicaState.READY, load=load)

    def stop(self, name: str, *, within: timedelta) -> None:
        self.set(name, state=ReplicaState.DRAINING, was_stopped=True)

    def forget(self, name: str) -> None:
        del self.found[name]

    def replicas(self) -> Sequence[Replica]:
        return list(self.found.values())

    def has_waiting_clients(self) -> bool:
        return self.waiting

    def close(self, *, within: timedelta) -> None:
        self.found.clear()
        for listener in (each for theirs in self.sockets.values() for each in theirs):
            listener.close()

    def states(self) -> list[str]:
        return [each.state.value for each in self.found.values()]


class Parent:
    """The parent's part, with a clock of the test's."""

    def __init__(self, home: Home, **replicas: Any) -> None:
        self.home = home
        self.messages = Messages()
        self.facts: dict[str, Any] = {}
        self.driver: Any = SimulatedReplicas()
        self.command: list[str] | None = None
        self.now = time.monotonic()
        serving = ServingConfig(port=0, replicas=ReplicaConfig(**replicas))
        self.models = ModelReplicas(
            home,
            serving,
            "0",
            "http",
            self.messages,  # type: ignore[arg-type]
            self.facts.update,
            start_driver=self._started,
        )
        home.serving.touch()

    def _started(self, home: Home, sockets: Mapping[str, Sequence[socket.socket]], output: int) -> Any:
        if self.command is not None:
            environment = dict(os.environ)
            self.driver = ProcessReplicas(
                self.command, sockets=sockets, environment=environment, output=output
            )
        else:
            self.driver.sockets = sockets
        return self.driver

    def pass_time(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds))):
            self.now += min(1.0, seconds)
            self.models.tick(self.now)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return open_home(tmp_path / "home", tmp_path / "config")


@pytest.fixture
def parent(home: Home) -> Iterator[Parent]:
    made = Parent(home)
    yield made
    made.models.close(by=time.monotonic())


def pauses_after(parent: Parent, starts: int) -> list[float]:
    """Let the model server start and end so often; return the pauses until the next starts."""
    found = []
    for _ in range(starts):
        parent.now = max(parent.now, parent.models.start_at)
        parent.models.tick(parent.now)
        (process,) = parent.driver._processes.values()
        process.process.wait(PATIENCE_S)
        parent.models.tick(parent.now)
        found.append(parent.models.start_at - parent.now)
    return found


def test_a_model_server_that_says_what_it_lacks_is_tried_ever_more_rarely(parent: Parent) -> None:
    parent.command = [sys.executable, "-c", UNABLE]

    pauses = pauses_after(parent, 4)

    assert pauses == pytest.approx([5, 15, 60, 60])
    assert parent.facts["models_problem"] == "the model server lacks memory"
    assert parent.messages.warned == ["the model server lacks memory"]


def test_a_model_server_that_ends_again_and_again_is_told_with_its_log(parent: Parent) -> None:
    parent.command = [sys.executable, "-c", "raise SystemExit(7)"]

    pauses = pauses_after(parent, model_replicas.CRASHES)

    assert pauses == pytest.approx([0.1, 1, 60])
    problem = parent.facts["models_problem"]
    assert problem.startswith("the model server ends as soon as it starts (code 7)")
    assert str(parent.home.logs / "models.jsonl") in problem


def test_a_taken_port_is_told_and_tried_again(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        parent = Parent(home)
        parent.models.port = port

        parent.pass_time(1)

        assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in parent.facts["models_problem"]
        assert "set serving.port in falaj.toml" in parent.messages.warned[0]
    parent.pass_time(6)
    parent.driver.ready()
    parent.pass_time(1)

    assert parent.facts["models_problem"] is None
    assert parent.facts["models"] == f"http://127.0.0.1:{port}"
    parent.models.close(by=time.monotonic())


def test_nothing_runs_until_something_is_deployed(parent: Parent) -> None:
    parent.home.serving.unlink()

    parent.pass_time(2)

    assert (parent.driver.states(), parent.facts) == ([], {})


def test_a_crashed_replica_is_replaced(parent: Parent) -> None:
    parent.pass_time(1)
    parent.driver.ready()
    parent.pass_time(1)

    parent.driver.set("1", state=ReplicaState.ENDED, exit="signal 9", age_s=100.0)
    parent.pass_time(0)
    assert parent.driver.states() == []
    parent.pass_time(1)

    assert parent.driver.states() == ["starting"]
    assert parent.messages.warned == ["the model server ended (signal 9); it is restarted"]


def test_load_starts_a_replica_and_says_why(home: Home) -> None:
    parent = Parent(home, max=3, concurrency=8)
    parent.pass_time(1)
    parent.driver.ready()
    parent.pass_time(3)

    parent.driver.ready(RecentLoad(in_flight=12.0, requests_per_s=50.0))
    parent.pass_time(4)

    assert parent.driver.states() == ["ready", "starting"]
    assert parent.messages.said == [
        "the model server gets 2 replicas: 12 requests at a time exceed 8 for each of 1"
    ]
    parent.driver.ready()
    parent.pass_time(1)
    words = "2 ready, between 1 and 3 (12 requests at a time exceed 8 for each of 1)"
    assert parent.facts["replicas"] == words
    parent.models.close(by=time.monotonic())


def test_the_last_replica_stops_when_idle_and_a_client_starts_one(home: Home) -> None:
    parent = Parent(home, min=0, idle="10s")
    parent.pass_time(1)
    parent.driver.ready()
    parent.pass_time(11)
    assert parent.driver.states() == ["draining"]
    assert parent.facts["models"]
    parent.driver.set("1", state=ReplicaState.ENDED)
    parent.pass_time(1)

    parent.driver.waiting = True
    parent.pass_time(0)

    assert parent.driver.states() == ["starting"]
    assert parent.messages.said[-1] == "the model server gets 1 replica: a client waits"
    assert parent.messages.warned == []
    parent.models.close(by=time.monotonic())


def test_a_restart_replaces_one_after_the_other(home: Home) -> None:
    parent = Parent(home, min=2, max=2)
    parent.pass_time(1)
    parent.driver.ready()
    parent.models.restart()

    parent.pass_time(1)
    assert parent.driver.states() == ["ready", "ready", "starting"]
    parent.pass_time(3)
    assert parent.driver.states() == ["ready", "ready", "starting"]
    parent.driver.set("1", state=ReplicaState.DRAINING)
    parent.driver.ready()
    parent.pass_time(1)

    assert parent.driver.states() == ["draining", "ready", "ready", "starting"]
    parent.models.close(by=time.monotonic())
