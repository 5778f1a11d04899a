"""The channel between the supervisor and the init process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from falaj.drivers.processes.supervisor.init_channel import SOCKET, InitChannel, InitReport


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[InitChannel, socket.socket]]:
    before = Path.cwd()
    talk = InitChannel(tmp_path)
    try:
        with socket.socket(socket.AF_UNIX) as peer_pid:
            peer_pid.connect(SOCKET)
            talk.accept()
            yield talk, peer_pid
    finally:
        os.chdir(before)
        talk._socket.close()


def test_cgroup_request_after_other_messages_is_received(
    ends: tuple[InitChannel, socket.socket],
) -> None:
    talk, peer_pid = ends

    peer_pid.sendall(b'{"running": true}\n{"enter": "rank-0"}\n')
    talk.receive()

    assert talk.request() == "rank-0"
    assert talk.request() is None


def test_partial_request_waits_for_the_rest(ends: tuple[InitChannel, socket.socket]) -> None:
    talk, peer_pid = ends
    peer_pid.sendall(b'{"running": true}\n{"enter": ')
    talk.receive()
    assert talk.request() is None

    peer_pid.sendall(b'"home"}\n')
    talk.receive()

    assert talk.request() == "home"


def test_report_is_found_after_requests(ends: tuple[InitChannel, socket.socket]) -> None:
    talk, peer_pid = ends

    peer_pid.sendall(b'{"enter": "home"}\n{"rank": 1, "exit_code": 3, "signal": null}\n')
    talk.receive()

    assert talk.request() == "home"
    assert talk.report() == InitReport(rank=1, exit_code=3, signal=None)
