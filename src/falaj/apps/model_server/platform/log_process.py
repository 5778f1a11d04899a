"""The process of the prediction log: stores what the model server hands over, until that ends.

    python -m falaj.apps.model_server.platform.log_process SOCKET_FD

It acts as the model server's account, listens on nothing and runs no model. It ends when the server's end of the socket
is closed, after it has stored what it was sent: so predictions that were handed over survive a server that is killed.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder

from falaj.apps.model_server.platform.log_channel import RunningLog, StartLog
from falaj.apps.model_server.platform.log_frames import (
    BatchClosed,
    BatchOpened,
    BatchStored,
    FrameReader,
    FromLog,
    RowsAnswered,
    RowsLost,
    ToLog,
    answered_batch,
    frame,
)
from falaj.apps.model_server.platform.prediction_writer import (
    PredictionSource,
    PredictionWriter,
    StoreBatch,
    VersionKey,
)
from falaj.governance.operations.caller import start_thread
from falaj.records.serving.tensors import ServedModel
from falaj.serving.dependencies import ColumnCollector

RECEIVE_BYTES = 1 << 20
FINISH_S = 30.0
"""How long a log whose server has ended tries to store what it has."""
RETRY_S = 0.5
NICENESS = 3
"""Where cores are scarce, requests come before what was answered already."""

_log = logging.getLogger(__name__)


class LogReceiver:
    """Reads the messages of the server, and tells it what became of batches."""

    def __init__(
        self,
        connection: socket.socket,
        store_batch: StoreBatch,
        *,
        every_s: float,
        collector: ColumnCollector | None = None,
        periodic: Callable[[], None] = lambda: None,
    ) -> None:
        """`periodic` is called every `every_s` seconds, and at the end."""
        self._connection = connection
        self._every_s = every_s
        self._periodic = periodic
        self._writer = PredictionWriter(store_batch, events=self, collector=collector)
        self._messages = FrameReader(ToLog)
        self._models: dict[bytes, ServedModel] = {}
        self._keys: dict[str, VersionKey] = {}

    def stored(self, ident: str) -> None:
        self._tell(BatchStored(ident))

    def lost(self, key: VersionKey, rows: int, ident: str = "") -> None:
        self._tell(RowsLost(*key, rows, ident))

    def run(self) -> None:
        """Store what arrives until the server has closed its end; then store the rest."""
        due = time.monotonic() + self._every_s
        while True:
            now = time.monotonic()
            wait_s = max(0.0, min(due, self._writer.next_due()) - now)
            readable, _, _ = select.select([self._connection], [], [], wait_s)
            if readable and not self._receive():
                break
            if time.monotonic() >= due:
                due = time.monotonic() + self._every_s
                _try(self._writer.write)
                _try(self._periodic)
            elif self._writer.next_due() <= time.monotonic():
                _try(self._writer.write)
        self._finish()

    def _receive(self) -> bool:
        """Handle what has arrived; false at the end."""
        try:
            data = self._connection.recv(RECEIVE_BYTES)
        except OSError:
            return False
        try:
            for message in self._messages.feed(data):
                try:
                    self._handle(message)
                except Exception:
                    _log.exception("a message of the model server cannot be stored")
        except ValueError:
            _log.exception("the model server sent what is no message")
            return False
        return bool(data)

    def _handle(self, message: ToLog) -> None:
        if isinstance(message, RowsAnswered):
            self._add(message)
        elif isinstance(message, BatchClosed):
            self._writer.close(message.ident, message.given)
        else:
            self._opened(message)

    def _opened(self, message: BatchOpened) -> None:
        model = self._models.get(message.model)
        if model is None:
            model = self._models[message.model] = ServedModel.model_validate_json(message.model)
        source = PredictionSource(message.registered, message.views, message.features)
        self._writer.open(message.ident, (message.endpoint, message.version), model, source)
        self._keys[message.ident] = (message.endpoint, message.version)
        while len(self._keys) > 1000:
            del self._keys[next(iter(self._keys))]

    def _add(self, message: RowsAnswered) -> None:
        ident = message.ident
        model, key = self._writer.model_of(ident), self._keys.get(ident)
        if model is None or key is None:
            if key is not None:
                self.lost(key, sum(message.counts) or len(message.numbers))
            return
        self._writer.add(ident, message.numbers, answered_batch(message, model, key[0]))

    def _finish(self) -> None:
        _try(self._writer.finish)
        until = time.monotonic() + FINISH_S
        while self._writer.has_unwritten and time.monotonic() < until:
            time.sleep(RETRY_S)
            _try(self._writer.write)
        _try(self._periodic)
        self._connection.close()

    def _tell(self, message: FromLog) -> None:
        with suppress(OSError):  # the server may be gone
            self._connection.sendall(frame(message))


def _try(step: Callable[[], None]) -> None:
    try:
        step()
    except Exception:
        _log.exception("prediction log step failed")


# -------------------------------------------------------------------------------------------- starting it


class LogThread:
    """A prediction log in a thread of this process: for tests, and where processes cannot be started."""

    def __init__(self, receiver: LogReceiver, connection: socket.socket) -> None:
        self._connection = connection
        self._thread = start_thread(receiver.run, name="prediction-log")

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def kill(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


class LogProcess:
    """A prediction log in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        threading.Thread(target=process.wait, name="prediction-log-end", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        self.process.kill()


def log_in_process(environment: dict[str, str]) -> StartLog:
    """Return what starts the prediction log in a process that gets the socket and `environment`, nothing else."""

    def start(connection: socket.socket) -> RunningLog:
        with connection:
            descriptor = connection.fileno()
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(descriptor)],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                start_new_session=True,
            )
        return LogProcess(process)

    return start


def give_up_rights() -> None:
    """Leave no way to more rights, and no core file with what is in memory."""
    import ctypes

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        no_new_privileges = 38
        prctl(no_new_privileges, 1, 0, 0, 0)


class NoPandas(MetaPathFinder):
    """Hides pandas from pyarrow, which imports it where it is installed: half a second of work, and 40 MB."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("the prediction log does not use pandas", name=fullname)


def main(arguments: Sequence[str]) -> None:
    from falaj.apps.logs import log_to
    from falaj.apps.model_server.platform.client import PlatformClient
    from falaj.assembly.home import open_home
    from falaj.assembly.model_server import service_caller
    from falaj.assembly.platform import assemble
    from falaj.records.governance.identity import Role
    from falaj.serving.service import MODEL_SERVER

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with its server, not before
    os.umask(0o077)
    os.nice(NICENESS)
    give_up_rights()
    sys.meta_path.insert(0, NoPandas())
    connection = socket.socket(fileno=int(arguments[0]))
    home = open_home()
    log_to(home.logs / "predictions.jsonl")
    platform = assemble(home)
    try:
        client = PlatformClient(platform, service_caller(platform.gate, MODEL_SERVER, Role.OPERATOR))
        LogReceiver(
            connection,
            client.store_batch,
            every_s=platform.config.serving.log_every.total_seconds(),
            collector=client.collector,
            periodic=client.deliver_windows,
        ).run()
    finally:
        platform.close()
    os._exit(0)  # everything is stored; the teardown of the interpreter would only take time


if __name__ == "__main__":
    main(sys.argv[1:])
