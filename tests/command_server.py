"""A fast `falaj` program for tests with many commands: each command is a fork of one process that imported the CLI."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from polling import eventually

LARGEST_REQUEST = 1 << 20
LOADED = ("falaj.apps.cli.app", "falaj.sdk.embedded", "falaj.sdk.remote", "falaj.sdk.training")
CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [request], [0, 1, 2])
    sys.exit(int(server.recv(16) or 1))
"""


@contextmanager
def command_folder() -> Iterator[Path]:
    """Yield a folder with the program `falaj`, to put first in PATH."""
    with tempfile.TemporaryDirectory(prefix="falaj-") as name:
        folder, address = Path(name), Path(name) / "socket"
        program = folder / "falaj"
        program.write_text(CLIENT.format(python=sys.executable, address=str(address)))
        program.chmod(0o755)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with subprocess.Popen([sys.executable, __file__, str(address)], env=environment) as server:
            try:
                eventually(address.exists)
                yield folder
            finally:
                server.kill()


def main(address: str) -> None:
    for module in LOADED:
        import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the commands' processes are not waited for
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(16)
        while True:
            connection, _ = listener.accept()
            with connection:
                request, descriptors, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, 3)
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    listener.close()
                    connection.send(str(perform(request, descriptors)).encode())
                    os._exit(0)
                for each in descriptors:
                    os.close(each)


def perform(request: bytes, descriptors: list[int]) -> int:
    """Run one command with the caller's arguments, folder, environment and streams; return its exit status."""
    from falaj.apps.cli.app import run

    arguments, folder, environment = json.loads(request)
    for number, each in enumerate(descriptors):
        os.dup2(each, number)
    sys.stdin, sys.stdout, sys.stderr = (open(n, m, closefd=False) for n, m in enumerate("rww"))  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["falaj", *arguments]
    try:
        status = run(arguments)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    main(sys.argv[1])
