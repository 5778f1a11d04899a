"""Starts MPI on several machines without ssh. A program of its own, with the standard library only.

- `start HOSTS PROCESSES COMMAND…` on the first node runs the job's mpiexec, MPICH or Open MPI, which starts a daemon on
  each other node by the next program;
- `run HOST COMMAND…` is called by mpiexec as if it were ssh: it sends the command to the other node, prints what it
  prints, and ends as it ends;
- `serve ADDRESS PORT` on every other node waits for that command and runs it, once;
- `rank FOLDER COMMAND…` runs one rank of MPICH, in the folder of its node. If the rank fails, mpiexec is told to end
  the others, as MPI_Abort does: it would wait for those on other machines.

Both sides know the secret of the attempt. A command is accepted only with a code that is made from it and from numbers
that both have just chosen, so that nobody else on the network can start something. If the connection ends, the command
is ended: no node outlives the others.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

SECRET_VARIABLE = "FALAJ_AGENT_SECRET"
NODES_VARIABLE = "FALAJ_MPI_NODES"
FOLDER_VARIABLE = "FALAJ_MPI_FOLDER"
"""The folder of the ranks on a node other than the first, whose own variables they would have otherwise."""
FIRST_PORT = 20_001
"""As in `process`: node N listens at N ports more."""
JOIN_TIMEOUT_S = 600.0
"""How long a node waits for one that starts later."""
HANDSHAKE_S = 10.0
GRACE_S = 5.0
SHELL = "/bin/sh"
LONGEST_COMMAND = 1 << 20
NONCE_BYTES = 32
CODE_BYTES = 32
OUTPUT, EXIT = b"o", b"x"
LOST = 255
"""The exit code of ssh for a connection that failed."""


def main(arguments: Sequence[str]) -> int:
    action, *rest = arguments
    if action == "start":
        hosts, processes, *command = rest
        return start(hosts.split(","), int(processes), command)
    if action == "serve":
        address, port = rest
        return serve(address, int(port))
    return rank(rest[0], rest[1:]) if action == "rank" else run(rest)


# ------------------------------------------------------------------------------------------- the first node


def start(hosts: Sequence[str], processes: int, command: Sequence[str]) -> int:
    """Become the mpiexec that runs `processes` on each host."""
    agent = written_agent()
    os.environ[NODES_VARIABLE] = ",".join(hosts)
    words = open_mpi(hosts, processes, agent) if is_open_mpi() else mpich(hosts, processes, agent)
    os.execvp(words[0], [*words, *command])  # noqa: S606 - no shell is wanted


def written_agent() -> str:
    """Return the path of a program that does `run`: mpiexec takes no arguments with it."""
    lines = [
        f"#!{sys.executable} -I",
        "import runpy, sys",
        "sys.argv[1:1] = ['run']",
        f"runpy.run_path({str(Path(__file__).absolute())!r}, run_name='__main__')",
    ]
    with tempfile.NamedTemporaryFile("w", prefix="falaj-mpi-", suffix=".py", delete=False) as agent:
        agent.write("\n".join(lines) + "\n")
    os.chmod(agent.name, 0o700)
    return agent.name


def is_open_mpi() -> bool:
    said = subprocess.run(["mpiexec", "--version"], capture_output=True, text=True, check=False)
    return "Open MPI" in said.stdout or "OpenRTE" in said.stdout


def open_mpi(hosts: Sequence[str], processes: int, agent: str) -> list[str]:
    """Return the command of Open MPI's mpiexec up to that of the ranks."""
    slots = ",".join(f"{host}:{processes}" for host in hosts)
    options = ["--prtemca", "plm_ssh_agent", agent, "--prtemca", "plm_ssh_no_tree_spawn", "1"]
    return ["mpiexec", *options, "--wdir", ".", "--host", slots, "-n", str(len(hosts) * processes)]


def mpich(hosts: Sequence[str], processes: int, agent: str) -> list[str]:
    """Return the command of MPICH's mpiexec up to that of the ranks."""
    slots = ",".join(f"{host}:{processes}" for host in hosts)
    reach = ["-launcher", "ssh", "-launcher-exec", agent, "-localhost", hosts[0]]
    place = ["-wdir", "/", "-hosts", slots, "-n", str(len(hosts) * processes)]
    one = [sys.executable, "-I", str(Path(__file__).absolute()), "rank", os.getcwd()]
    return ["mpiexec", *reach, *place, *one]


# --------------------------------------------------------------------------------------- in place of ssh


def run(arguments: Sequence[str]) -> int:
    """Run a command on another node, and return its exit code."""
    words = list(arguments)
    while words and words[0].startswith("-"):  # options of ssh, like -x
        words.pop(0)
    host, *command = words
    hosts = os.environ[NODES_VARIABLE].split(",")
    with connect(host, FIRST_PORT + hosts.index(host)) as connection:
        body = " ".join(command).encode()
        theirs, own = receive(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
        connection.sendall(own + code(theirs, own, body) + len(body).to_bytes(4) + body)
        connection.settimeout(None)
        return show(connection)


def connect(host: str, port: int) -> socket.socket:
    """Return a connection to a node, which may start later than this one."""
    until = time.monotonic() + JOIN_TIMEOUT_S
    while True:
        try:
            connection = socket.create_connection((host, port), HANDSHAKE_S)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
            continue
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection


def show(connection: socket.socket) -> int:
    """Print what the command prints, and return its exit code."""
    while True:
        try:
            kind = receive(connection, 1)
            data = receive(connection, int.from_bytes(receive(connection, 4)))
        except OSError:
            print("the connection to another node of the job was lost", file=sys.stderr, flush=True)
            os.kill(os.getppid(), signal.SIGTERM)  # mpiexec would wait for ever
            return LOST
        if kind == EXIT:
            return int.from_bytes(data)
        os.write(sys.stdout.fileno(), data)


# ----------------------------------------------------------------------------------------- the other nodes


def serve(address: str, port: int) -> int:
    """Run the command that the first node sends; that node judges how it ended."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family) as listener:
        listener.settimeout(JOIN_TIMEOUT_S)
        while True:
            connection, _ = listener.accept()
            with connection:
                command = accepted(connection)
                if command is not None:
                    listener.close()
                    obey(connection, command)
                    return 0


def accepted(connection: socket.socket) -> str | None:
    """Return the command that a connection brings; none if it does not know the secret."""
    connection.settimeout(HANDSHAKE_S)
    own = secrets.token_bytes(NONCE_BYTES)
    with suppress(OSError, ValueError):
        connection.sendall(own)
        theirs, given = receive(connection, NONCE_BYTES), receive(connection, CODE_BYTES)
        size = int.from_bytes(receive(connection, 4))
        if size > LONGEST_COMMAND:
            return None
        body = receive(connection, size)
        if hmac.compare_digest(given, code(own, theirs, body)):
            return body.decode()
    return None


def obey(connection: socket.socket, command: str) -> None:
    """Run a command, send what it prints, and end it if the connection ends.

    mpiexec expects a shell, as with ssh; MPICH's commands need none.
    """
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    process = subprocess.Popen(
        [SHELL, "-c", command] if os.path.exists(SHELL) else shlex.split(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, FOLDER_VARIABLE: os.getcwd()},
        start_new_session=True,
    )
    threading.Thread(target=end_with, args=(connection, process), daemon=True).start()
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    with suppress(OSError):
        while data := os.read(process.stdout.fileno(), 1 << 16):
            connection.sendall(OUTPUT + len(data).to_bytes(4) + data)
    returned = process.wait()
    exit_code = returned if returned >= 0 else 128 - returned
    with suppress(OSError):
        connection.sendall(EXIT + (4).to_bytes(4) + exit_code.to_bytes(4))


def end_with(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End a process when the other side of its connection is gone."""
    with suppress(OSError):
        connection.recv(1)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------- ranks of MPICH


def rank(folder: str, command: Sequence[str]) -> int:
    """Run a rank, and let the process manager end all others if it fails. `folder` is that of the first node."""
    os.chdir(os.environ.get(FOLDER_VARIABLE, folder))
    signal.signal(signal.SIGTERM, lambda *_: None)  # the rank gets it too, and decides
    returned = subprocess.Popen(command, close_fds=False).wait()
    exit_code = returned if returned >= 0 else 128 - returned
    if exit_code and "PMI_FD" in os.environ:
        with suppress(OSError):
            os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=%d\n" % exit_code)
        time.sleep(GRACE_S)  # it is ended meanwhile
    return exit_code


# ----------------------------------------------------------------------------------------------- both sides


def code(server: bytes, client: bytes, body: bytes) -> bytes:
    """Return what only who knows the secret of the attempt can make of these."""
    key = os.environ[SECRET_VARIABLE].encode()
    return hmac.new(key, b"falaj mpi\0" + server + client + body, hashlib.sha256).digest()


def receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionError("the connection has ended")
        data += piece
    return bytes(data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
