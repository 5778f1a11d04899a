"""Ports that the platform chooses for itself."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from falaj.apps.http_server import listen
from falaj.apps.ports import listen_on, spell_port
from falaj.apps.supervisor import is_fixed
from falaj.errors import Unavailable
from falaj.records.config import ServerConfig, ServingConfig

HOST = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which something listens; nothing does on the second one after it."""
    while True:
        with ExitStack() as held:
            first = held.enter_context(socket.create_server((HOST, 0))).getsockname()[1]
            try:
                socket.create_server((HOST, first + 2)).close()
            except OSError:
                continue
            yield first
            return


def test_a_port_that_nobody_chose_is_replaced_by_the_next_that_is_free(taken: int) -> None:
    with listen(HOST, spell_port(taken, fixed=False)) as listener:
        assert listener.getsockname()[1] == taken + 2


def test_a_port_that_somebody_chose_is_not_replaced(taken: int) -> None:
    with pytest.raises(Unavailable) as refused:
        listen(HOST, spell_port(taken, fixed=True))

    assert "set server.port" in str(refused.value)


def test_only_a_taken_port_is_replaced() -> None:
    tried: list[int] = []

    def refuse(port: int) -> socket.socket:
        tried.append(port)
        raise PermissionError(13, "Permission denied")

    with pytest.raises(PermissionError):
        listen_on("80+", refuse)
    assert tried == [80]


def test_the_last_port_is_not_exceeded() -> None:
    with ExitStack() as held:
        for port in (65533, 65535):
            try:
                held.enter_context(socket.create_server((HOST, port)))
            except OSError:
                pytest.skip("the port is in use")
        with pytest.raises(OSError, match="in use"):
            listen_on("65533+", partial(lambda port: socket.create_server((HOST, port))))


def test_a_port_may_move_that_nobody_chose_and_only_this_machine_reaches() -> None:
    assert not is_fixed(ServerConfig(), "127.0.0.1")
    assert is_fixed(ServerConfig(port=7480), "127.0.0.1")
    assert is_fixed(ServingConfig(), "10.0.0.1")


def test_zero_stays_any_free_port() -> None:
    assert spell_port(0, fixed=False) == "0"
