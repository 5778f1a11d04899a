"""The ReplicaDriver contract: replicas behind one address start, drain and crash, and lose no client."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest

import replica_program
from falaj.apps.ports import open_sockets
from falaj.drivers.processes.replicas import ProcessReplicas, shares, sockets_needed
from falaj.ports.replicas import ReplicaDriver
from falaj.records.control.replicas import Replica, ReplicaState
from polling import PATIENCE_S, eventually

SOON = timedelta(seconds=20)


@dataclass
class ReplicaTestbed:
    """Makes drivers whose replicas answer lines on one address."""

    drivers: list[ReplicaDriver] = field(default_factory=list)
    port: int = 0

    def driver(self, *, load_s: float = 0.0, mode: str = "plain", sockets: int = 6) -> ReplicaDriver:
        listening = open_sockets("127.0.0.1", "0", sockets)
        self.port = listening[0].getsockname()[1]
        command = [sys.executable, replica_program.__file__, str(load_s), mode]
        environment = os.environ | {"PYTHONPATH": str(Path(replica_program.__file__).parent)}
        made = ProcessReplicas(command, sockets={"lines": listening}, environment=environment, output=2)
        self.drivers.append(made)
        return made

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def ask(self, seconds: float = 0.0) -> tuple[str, int]:
        """Return name and process of the replica that answers a new connection."""
        with self.connect() as client:
            return asked(client, seconds)


def asked(client: socket.socket, seconds: float = 0.0) -> tuple[str, int]:
    client.sendall(f"{seconds}\n".encode())
    name, _, process = client.makefile().readline().partition(" ")
    return name, int(process)


@pytest.fixture
def testbed() -> Iterator[ReplicaTestbed]:
    made = ReplicaTestbed()
    yield made
    for driver in made.drivers:
        driver.close(within=timedelta(seconds=1))


def state_of(driver: ReplicaDriver, name: str) -> ReplicaState | None:
    return next((each.state for each in driver.replicas() if each.name == name), None)


def reaches(driver: ReplicaDriver, name: str, state: ReplicaState) -> Callable[[], bool]:
    return lambda: state_of(driver, name) is state


def started(driver: ReplicaDriver, number: int = 1) -> list[str]:
    """Start replicas and wait until they are ready."""
    names = [driver.start() for _ in range(number)]
    for name in names:
        eventually(reaches(driver, name, ReplicaState.READY))
    return names


def one(driver: ReplicaDriver, name: str) -> Replica:
    return next(each for each in driver.replicas() if each.name == name)


def test_a_client_that_comes_before_the_first_replica_waits_for_it(testbed: ReplicaTestbed) -> None:
    driver = testbed.driver()
    assert driver.replicas() == []
    assert not driver.has_waiting_clients()

    with testbed.connect() as client:
        client.sendall(b"0\n")
        eventually(driver.has_waiting_clients)
        name = driver.start()
        assert state_of(driver, name) is ReplicaState.STARTING
        eventually(reaches(driver, name, ReplicaState.READY))

        assert client.makefile().readline().split()[0] == name
    found = one(driver, name)
    assert found.pid is not None
    assert found.load is not None
    assert (found.load.in_flight, found.load.p99_ms, found.load.rss_bytes) == (2, 5, 1000)


def test_all_ready_replicas_get_connections(testbed: ReplicaTestbed) -> None:
    driver = testbed.driver()
    names = started(driver, 2)

    answers = [testbed.ask()[0] for _ in range(60)]

    assert set(answers) == set(names)
    assert min(answers.count(name) for name in names) >= 10


def test_more_replicas_than_sockets_share_them(testbed: ReplicaTestbed) -> None:
    driver = testbed.driver(sockets=1)

    started(driver, 2)

    assert testbed.ask()[0] in "12"


def test_a_stopped_replica_answers_what_it_has_and_others_get_the_rest(testbed: ReplicaTestbed) -> None:
    driver = testbed.driver()
    started(driver)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(testbed.ask, 0.5)
        eventually(lambda: not driver.has_waiting_clients())
        other = driver.start()
        eventually(reaches(driver, other, ReplicaState.READY))

        driver.stop("1", within=SOON)

        assert state_of(driver, "1") in (ReplicaState.DRAINING, ReplicaState.ENDED)
        eventually(lambda: {testbed.ask()[0] for _ in range(20)} == {other})
        assert slow.result()[0] == "1"
    eventually(reaches(driver, "1", ReplicaState.ENDED))
    assert (one(driver, "1").was_stopped, one(driver, "1").exit) == (True, "code 0")


def test_a_replica_that_does_not_end_is_killed_at_its_deadline(testbed: ReplicaTestbed) -> None:
    driver = testbed.driver(mode="stays")
    (name,) = started(driver)

    driver.stop(name, within=timedelta(seconds=0.2))
    driver.stop(name, within=SOON)  # keeps the deadline

    eventually(reaches(driver, name, ReplicaState.ENDED))
    assert one(driver, name).exit == "signal 9"
    assert one(driver, name).was_stopped


def test_a_replica_that_is_not_ready_ends_at_once(testbed: ReplicaTestbed) -> None:
    driver = testbed.driver(load_s=60)
    name = driver.start()

    driver.stop(name, within=SOON)

    eventually(reaches(driver, name, ReplicaState.ENDED))
    assert one(driver, name).was_stopped


def test_a_killed_replica_loses_its_own_requests_only(testbed: ReplicaTestbed) -> None:
    driver = testbed.driver()
    started(driver, 2)
    with testbed.connect() as own:
        name, process = asked(own)
        os.kill(process, signal.SIGKILL)
        assert own.recv(1) == b""

    waiting = [testbed.connect() for _ in range(12)]  # also at the sockets of the killed one
    eventually(reaches(driver, name, ReplicaState.ENDED))

    assert {asked(client)[0] for client in waiting} == {"1", "2"} - {name}
    ended = one(driver, name)
    assert (ended.exit, ended.was_stopped) == ("signal 9", False)
    for client in waiting:
        client.close()


def test_an_ended_replica_is_listed_until_it_is_forgotten(testbed: ReplicaTestbed) -> None:
    driver = testbed.driver(mode="problem")
    name = driver.start()
    eventually(reaches(driver, name, ReplicaState.ENDED))
    assert (one(driver, name).problem, one(driver, name).exit) == ("the file is missing", "code 1")
    assert driver.start() != name

    driver.forget(name)

    assert state_of(driver, name) is None
    assert driver.start() == name


def test_a_replaced_replica_drains_when_its_successor_is_ready(testbed: ReplicaTestbed) -> None:
    driver = testbed.driver()
    (old,) = started(driver)

    new = driver.start(replaces=old)
    while (found := {each.name: each.state for each in driver.replicas()})[new] is ReplicaState.STARTING:
        assert found[old] is ReplicaState.READY
        assert testbed.ask()[0] == old

    assert state_of(driver, old) in (ReplicaState.DRAINING, ReplicaState.ENDED)
    eventually(lambda: {testbed.ask()[0] for _ in range(20)} == {new})


@pytest.mark.slow
def test_a_replica_that_loads_for_long_gets_connections_while_there_is_no_other(
    testbed: ReplicaTestbed,
) -> None:
    driver = testbed.driver(load_s=60)
    name = driver.start()

    eventually(reaches(driver, name, ReplicaState.READY))


def test_closing_stops_all_and_gives_the_address_up(testbed: ReplicaTestbed) -> None:
    driver = testbed.driver(mode="stays")
    started(driver)
    process = one(driver, "1").pid
    assert process is not None

    driver.close(within=timedelta(seconds=0.2))

    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    with pytest.raises(ConnectionRefusedError):
        testbed.connect()


@pytest.mark.parametrize("most", [1, 2, 3, 4, 6, 8, 64])
def test_sockets_are_shared_out_completely_and_evenly(most: int) -> None:
    sockets = sockets_needed(most)
    for replicas in range(1, most + 1):
        found = [shares(sockets, replicas, place) for place in range(replicas)]

        assert sorted(index for each in found for index in each) == list(range(sockets))
        assert max(map(len, found)) - min(map(len, found)) <= (0 if most <= 6 else 1)
