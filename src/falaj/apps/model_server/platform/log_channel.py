"""The socket between the server and the process of its prediction log, which is started again when it ends."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from falaj.apps.model_server.platform.log_frames import FrameReader, FromLog

HAND_OVER_S = 0.005
HAND_OVER_BYTES = 64 * 1024
"""What is to be sent is gathered for this time, or up to this size: each wake-up of the log costs the server time."""
MAX_UNSENT_BYTES = 64 * 2**20
"""Bytes that wait while the log cannot keep up; more are dropped."""
SOCKET_BYTES = 4 * 2**20
"""Buffer of the socket, which survives the server."""
RESTART_S, MAX_RESTART_S = 0.2, 10.0
"""Pause before the log is started again, doubled each time that it ends soon."""
STEADY_S = 30.0
STOP_S = 8.0
"""How long the end of the server waits for the log to store what it has."""

_log = logging.getLogger(__name__)


class RunningLog(Protocol):
    """A prediction log that reads the other end of the socket, and ends when it is closed."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; false if it has not ended in time."""
        ...

    def kill(self) -> None: ...


class StartLog(Protocol):
    """Starts a prediction log on its end of the socket."""

    def __call__(self, connection: socket.socket, /) -> RunningLog: ...


class LogChannel:
    """Sends messages without blocking, in order. Used on the event loop."""

    def __init__(
        self, start: StartLog, *, received: Callable[[FromLog], None], restarted: Callable[[], None]
    ) -> None:
        """`restarted` is called when the log has ended and all that it has not stored is lost."""
        self._start = start
        self._on_message = received
        self._on_restart = restarted
        self._unsent: deque[bytes | memoryview] = deque()
        self._unsent_bytes = 0
        self._due: asyncio.TimerHandle | None = None
        self._writes = False
        self._socket: socket.socket | None = None
        self._log: RunningLog | None = None
        self._reader = FrameReader(FromLog)
        self._pause_s = RESTART_S
        self._started_at = 0.0
        self._stopping = False
        self._closed = asyncio.Event()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._launch()

    async def stop(self) -> None:
        """Send what is left, close our end, and wait until the log has stored it and ended."""
        self._stopping = True
        if self._socket is None or self._log is None:
            return
        self._write()
        until = time.monotonic() + STOP_S
        while self._unsent and self._socket is not None and time.monotonic() < until:
            await asyncio.sleep(0.005)
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), max(0.1, until - time.monotonic()))
        ended = await asyncio.to_thread(self._log.wait, max(0.5, until - time.monotonic()))
        if not ended:
            _log.error("the prediction log did not end in time and was killed")
            self._log.kill()
        self._disconnect()

    def send(self, message: bytes, *, always: bool = False) -> bool:
        """Queue a message; false, and dropped, if too much is waiting. `always`: it is small and must arrive."""
        if self._unsent_bytes > MAX_UNSENT_BYTES and not always:
            return False
        self._unsent.append(message)
        self._unsent_bytes += len(message)
        if self._writes or self._socket is None:
            return True
        if self._unsent_bytes >= HAND_OVER_BYTES:
            self._write()
        elif self._due is None:
            self._due = self._loop.call_later(HAND_OVER_S, self._write)
        return True

    # --------------------------------------------------------------------------------------- the process

    def _launch(self) -> None:
        if self._stopping:
            return
        ours, theirs = socket.socketpair()
        try:
            for each in (ours, theirs):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
            self._log = self._start(theirs)
        except OSError:
            _log.exception("the prediction log cannot be started; retrying")
            ours.close()
            theirs.close()
            self._retry()
            return
        ours.setblocking(False)
        self._socket = ours
        self._reader = FrameReader(FromLog)
        self._started_at = time.monotonic()
        self._loop.add_reader(ours, self._read)
        self._write()

    def _retry(self) -> None:
        if time.monotonic() - self._started_at > STEADY_S:
            self._pause_s = RESTART_S
        self._loop.call_later(self._pause_s, self._launch)
        self._pause_s = min(2 * self._pause_s, MAX_RESTART_S)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            if self._writes:
                self._loop.remove_writer(self._socket)
            self._socket.close()
        self._socket, self._writes = None, False
        if self._due is not None:
            self._due.cancel()
            self._due = None
        self._closed.set()

    def _ended(self) -> None:
        """Start the log again; what it was sent and has not stored is lost, and so is what names those batches."""
        self._disconnect()
        if self._stopping:
            return
        _log.error("the prediction log has ended; starting it again")
        self._unsent.clear()
        self._unsent_bytes = 0
        if self._log is not None:
            self._log.kill()
        self._on_restart()
        self._retry()

    # ---------------------------------------------------------------------------------------- the socket

    def _read(self) -> None:
        if self._socket is None:
            return
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._ended()
            return
        try:
            for message in self._reader.feed(data):
                self._on_message(message)
        except ValueError:
            _log.exception("the prediction log sent what is no message")
            self._ended()

    def _write(self) -> None:
        """Send as much as the socket takes, and the rest when it takes more."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._socket is None:
            return
        if len(self._unsent) > 1:
            self._unsent = deque([b"".join(self._unsent)])
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent[0])
            except BlockingIOError:
                break
            except OSError:
                self._ended()
                return
            self._unsent_bytes -= sent
            rest = memoryview(self._unsent.popleft())[sent:]
            if len(rest):
                self._unsent.appendleft(rest)
        if self._writes is not bool(self._unsent):
            self._writes = bool(self._unsent)
            change = self._loop.add_writer if self._writes else self._loop.remove_writer
            change(self._socket, *((self._write,) if self._writes else ()))
