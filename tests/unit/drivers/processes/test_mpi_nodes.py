"""Commands that mpiexec starts on other nodes of a job, without ssh."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from falaj.drivers.processes.frameworks import mpi_nodes
from polling import PATIENCE_S, eventually

PROGRAM = [sys.executable, "-I", mpi_nodes.__file__]
MPIEXEC = [sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"]
"""Stands for mpiexec: the parent of a command that waits until that has ended."""
PORT = mpi_nodes.FIRST_PORT + 1


class Node:
    """The second node of a job, at an address that no other test has; it waits for a command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"127.{random.randint(1, 254)}.{random.randint(0, 255)}.{random.randint(2, 254)}"
        self.process = subprocess.Popen(
            [*PROGRAM, "serve", self.address, str(PORT)], env=self.environment(), cwd=folder
        )

    def environment(self, secret: str = "ours") -> dict[str, str]:
        hosts = f"127.0.0.1,{self.address}"
        return {"PATH": os.environ["PATH"], "FALAJ_AGENT_SECRET": secret, "FALAJ_MPI_NODES": hosts}

    def run(self, *command: str, secret: str = "ours") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*MPIEXEC, *PROGRAM, "run", "-x", self.address, *command],
            env=self.environment(secret),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def connect(self) -> socket.socket:
        return eventually(lambda: attempted(self.address))


def attempted(address: str) -> socket.socket | None:
    with suppress(OSError):
        return socket.create_connection((address, PORT), PATIENCE_S)
    return None


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()


def test_output_and_exit_code_come_back(node: Node) -> None:
    called = node.run('"/bin/echo"', "one two;", "exit", "7")

    assert called.communicate(timeout=PATIENCE_S)[0] == "one two\n"
    assert called.returncode == 7
    assert node.process.wait(PATIENCE_S) == 0  # the first node judges


def test_who_does_not_know_the_secret_starts_nothing(node: Node) -> None:
    node.connect().close()
    with node.connect() as stranger:
        stranger.sendall(b"\xff" * 200)
        with suppress(ConnectionResetError):
            assert len(stranger.recv(1000, socket.MSG_WAITALL)) == mpi_nodes.NONCE_BYTES
    guess = node.run("touch", "guessed", secret="theirs")
    guess.communicate(timeout=PATIENCE_S)

    called = node.run("touch", "made")

    called.communicate(timeout=PATIENCE_S)
    assert called.returncode == 0
    assert sorted(path.name for path in node.folder.iterdir()) == ["made"]


def test_a_command_ends_with_its_connection(node: Node) -> None:
    called = node.run("touch", "began;", "exec", "sleep", "600")
    eventually(lambda: (node.folder / "began").exists())

    os.killpg(called.pid, signal.SIGKILL)
    called.communicate(timeout=PATIENCE_S)

    assert node.process.wait(PATIENCE_S) == 0


def test_a_node_that_is_lost_ends_mpiexec(node: Node) -> None:
    waiting = node.run("touch", "began;", "exec", "sleep", "20")
    eventually(lambda: (node.folder / "began").exists())

    node.process.kill()

    assert "lost" in waiting.communicate(timeout=PATIENCE_S)[1]
    assert waiting.returncode == -signal.SIGTERM


def test_a_failed_rank_tells_the_process_manager_to_end_the_others() -> None:
    read, write = os.pipe()
    command = [*PROGRAM, "rank", "/", sys.executable, "-c", "raise SystemExit(3)"]

    with subprocess.Popen(command, env={"PMI_FD": str(write)}, pass_fds=[write]) as rank:
        os.close(write)
        said = os.read(read, 100)
        rank.kill()

    assert said == b"cmd=abort exitcode=3\n"
    os.close(read)
