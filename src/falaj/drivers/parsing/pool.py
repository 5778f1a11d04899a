"""Calls parsers in the parser process: starts it at the first call, replaces it when it ends, serves its reads."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from falaj.drivers.parsing.messages import (
    MESSAGE_LIMIT,
    RANGE_LIMIT,
    Broken,
    receive_exactly,
    receive_message,
    send_bytes,
    send_message,
)
from falaj.errors import (
    FalajError,
    Fault,
    Internal,
    InvalidInput,
    IsolationRefused,
    TooLarge,
    Unavailable,
    rebuild,
)
from falaj.ports.parsers import ByteSource, Parsed, Reserve
from falaj.ports.sandbox import Sandbox, UserCode

log = logging.getLogger("falaj.parsing")

COMMAND = ("-I", "-m", "falaj.drivers.parsing.worker")
START_S = 30.0
GRACE_S = 2.0
"""A child is killed by its own alarm; this is how much later the whole process is, if that did not happen."""

ENDING_S = 0.2
"""A process that has closed its channels ends within this time."""

PACKAGE = Path(__file__).parents[2]
SCRATCH_BYTES = 1 << 20
ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # raises MemoryError at the limit
    "OPENBLAS_NUM_THREADS": "1",  # a process that forks should have no threads
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class ParserLimits:
    """What one call may use, how many run at once, and how long a call waits for its turn."""

    memory_bytes: int = 2 << 30
    seconds: int = 120
    calls: int = 4
    wait_s: float = 60.0


class _Turns:
    """Lets `calls` run at once, and of one owner at most half of them."""

    def __init__(self, calls: int, wait_s: float) -> None:
        self._calls, self._each, self._wait_s = calls, max(1, calls // 2), wait_s
        self._running: Counter[str] = Counter()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, owner: str) -> Iterator[None]:
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_free(owner), timeout=self._wait_s):
                raise Unavailable("all parsers are busy; try again later")
            self._running[owner] += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= Counter({owner: 1})  # forgets owners that have none left
                self._changed.notify_all()

    def _is_free(self, owner: str) -> bool:
        return self._running.total() < self._calls and self._running[owner] < self._each


@dataclass
class _Worker:
    """A started parser process. `sandbox` is the name of what it runs in."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    sandbox: str
    sending: threading.Lock = field(default_factory=threading.Lock)

    def call(self, request: bytes, channel: socket.socket) -> None:
        with self.sending:
            socket.send_fds(self.control, [b"\0"], [channel.fileno()])
            send_bytes(self.control, request)

    def has_ended(self) -> bool:
        """Whether the process, not only a child of it, has ended or is about to."""
        try:
            self.process.wait(timeout=ENDING_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> str:
        """Kill the process with all its children. Return the end of what it wrote to its standard error."""
        if self.process.stderr is None or self.process.stderr.closed:
            return ""  # stopped before
        self.control.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with self.process.stderr as stream:
            os.set_blocking(stream.fileno(), False)
            return (stream.read() or b"").decode(errors="replace").strip()[-1000:]


class ProcessParserPool:
    """A ParserPool over one parser process, which forks.

    `parsers` are functions by name, each written as `package.module:function`. `sandboxes` are tried in their order
    until one starts. `hidden` are paths that must stay closed to the process even where a sandbox shows the machine;
    `folders` have further modules with parsers.
    """

    def __init__(
        self,
        parsers: Mapping[str, str],
        *,
        sandboxes: Callable[[], Sequence[Sandbox]],
        hidden: Sequence[Path] = (),
        folders: Sequence[Path] = (),
        limits: ParserLimits | None = None,
    ) -> None:
        self._parsers = dict(parsers)
        self._sandboxes = sandboxes
        self._hidden = tuple(hidden)
        self._folders = tuple(folders)
        self._limits = limits or ParserLimits()
        self._turns = _Turns(self._limits.calls, self._limits.wait_s)
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._closed = False
        # A sandboxed process ends with the thread that started it, so one thread starts them all.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parsing")

    @property
    def isolation(self) -> str:
        return self._running().sandbox

    def parse(
        self,
        name: str,
        sources: Sequence[ByteSource] = (),
        options: Mapping[str, Any] | None = None,
        *,
        owner: str,
        reserve: Reserve | None = None,
    ) -> Parsed:
        request = {
            "name": name,
            "options": dict(options or {}),
            "sizes": [source.size_bytes for source in sources],
            "memory_bytes": self._limits.memory_bytes,
            "seconds": self._limits.seconds,
        }
        message = json.dumps(request).encode()
        if len(message) > MESSAGE_LIMIT:  # the process would end, and with it the calls of others
            raise TooLarge(f"what the parser is told, such as SQL and columns, exceeds {MESSAGE_LIMIT} bytes")
        with self._turns.take(owner):
            return self._parse(message, sources, reserve or _refuse_content)

    def close(self) -> None:
        with self._lock:
            worker, self._worker, self._closed = self._worker, None, True
            if worker is not None:
                worker.stop()
        self._starter.shutdown()

    def _parse(self, request: bytes, sources: Sequence[ByteSource], reserve: Reserve) -> Parsed:
        """Call the process; once more if it has ended, since then these bytes need not be the reason."""
        for _ in range(2):
            worker, late = self._running(), threading.Event()
            try:
                return self._call(worker, request, sources, reserve, late)
            except (Broken, ConnectionError) as error:
                if late.is_set():
                    seconds = self._limits.seconds
                    raise TooLarge(f"parsing took longer than {seconds} s; send less at once") from None
                if not worker.has_ended():
                    raise _crash(error) from None
                self._discard(worker)
        raise Unavailable("the parser process ended; try again later")

    def _call(
        self,
        worker: _Worker,
        request: bytes,
        sources: Sequence[ByteSource],
        reserve: Reserve,
        late: threading.Event,
    ) -> Parsed:
        """Send the request, and serve the reads of the child until it has answered."""
        here, there = socket.socketpair()
        with here, self._stopped_when_late(worker, here, late):
            with there:
                worker.call(request, there)
            while True:
                message = receive_message(here)
                if "read" in message:
                    send_bytes(here, _range(sources, message["read"]))
                elif "facts" in message:
                    return _result(here, message, reserve)
                else:
                    raise self._failure(message)

    @contextlib.contextmanager
    def _stopped_when_late(
        self, worker: _Worker, channel: socket.socket, late: threading.Event
    ) -> Iterator[None]:
        """Kill the process if a child goes on after its alarm, whatever it does; `late` says so.

        Not where the child has gone and it is the platform that takes long, with a slow store or for want of memory:
        others have children in that process.
        """

        def stop() -> None:
            if not _has_hung_up(channel):
                late.set()
                self._discard(worker)

        timer = threading.Timer(self._limits.seconds + GRACE_S, stop)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _failure(self, message: dict[str, Any]) -> FalajError:
        if "no_memory" in message:
            return TooLarge(
                f"parsing needs more than {self._limits.memory_bytes >> 20} MiB of memory; send less at once"
            )
        if "error" in message:
            with contextlib.suppress(TypeError, ValueError):
                code, text, faults = message["error"]
                found = rebuild(str(code), str(text), faults, {})
                if isinstance(found, InvalidInput):
                    return found
        log.error("a parser failed", extra={"reason": str(message.get("failed", message))[:10_000]})
        if "failed" in message:
            return _unreadable("bytes that the parser cannot handle")
        return Internal("a parser failed; the log says why")

    def _running(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise Unavailable("the platform is being closed")
            if self._worker is not None and self._worker.process.poll() is not None:
                self._worker.stop()
                self._worker = None
            if self._worker is None:
                self._worker = self._starter.submit(self._start).result()
            return self._worker

    def _discard(self, worker: _Worker) -> None:
        with self._lock:
            worker.stop()
            if self._worker is worker:
                self._worker = None

    def _start(self) -> _Worker:
        """Start the process in the first sandbox in which it gets ready."""
        faults = []
        for sandbox in self._sandboxes():
            try:
                return self._start_in(sandbox)
            except (IsolationRefused, OSError, Broken) as error:
                faults.append(Fault(where=sandbox.name, given=str(error)))
        log.error("no parser process can be started", extra={"reason": str(faults)})
        raise Unavailable("no parser process can be started", faults=faults)

    def _start_in(self, sandbox: Sandbox) -> _Worker:
        here, there = socket.socketpair()
        folder = Path(tempfile.mkdtemp(prefix="falaj-parsing-"))
        try:
            with there:
                process = sandbox.start(self._code(folder), stdout=there.fileno(), stderr=subprocess.PIPE)
            worker = _Worker(process, here, sandbox.name)
            self._introduce(worker)
            return worker
        except BaseException:
            here.close()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # it writes nothing, but a sandbox has a directory

    def _introduce(self, worker: _Worker) -> None:
        """Tell the process its parsers, and wait until it has imported them."""
        try:
            worker.control.settimeout(START_S)
            send_message(
                worker.control, {"parsers": self._parsers, "folders": [str(each) for each in self._folders]}
            )
            receive_message(worker.control)
            worker.control.settimeout(None)
        except (OSError, Broken) as error:
            said = worker.stop()
            raise Broken(said or str(error)) from None

    def _code(self, folder: Path) -> UserCode:
        return UserCode(
            [sys.executable, *COMMAND],
            folder,
            environment=ENVIRONMENT,
            readable=[PACKAGE, *self._folders],
            hidden=self._hidden,
            scratch_bytes=SCRATCH_BYTES,
            shared_memory_bytes=SCRATCH_BYTES,
        )


def _has_hung_up(channel: socket.socket) -> bool:
    """Whether the other side has gone, even if it has sent more than was read."""
    watched = select.poll()
    watched.register(channel, select.POLLHUP)
    return any(happened & select.POLLHUP for _, happened in watched.poll(0))


def _refuse_content(size_bytes: int) -> None:
    """Refuse more than a little: this caller wants facts, and has no memory reserved for anything else."""
    if size_bytes > MESSAGE_LIMIT:
        raise Broken(f"{size_bytes} bytes of content that nobody asked for")


def _crash(error: Exception) -> InvalidInput:
    log.warning("a parser crashed", extra={"reason": str(error)})
    return _unreadable("bytes at which the parser crashed, or used too much memory or time")


def _unreadable(given: str) -> InvalidInput:
    return InvalidInput.at(
        "content",
        given=given,
        allowed="an undamaged file of moderate size",
        fix="write it anew with a current library, or send it in parts",
    )


def _range(sources: Sequence[ByteSource], asked: Any) -> bytes:
    """The bytes that a child asks for: of the call's own sources, and not many at once."""
    try:
        number, offset, length = map(int, asked)
        source = sources[number]
    except (TypeError, ValueError, IndexError) as error:
        raise Broken(f"a read of {asked!r}") from error
    if number < 0 or not 0 <= offset <= source.size_bytes or not 0 <= length <= RANGE_LIMIT:
        raise Broken(f"a read of {asked!r}")
    return source.read_range(offset, length)


def _result(here: socket.socket, message: dict[str, Any], reserve: Reserve) -> Parsed:
    facts, size_bytes = message["facts"], message.get("size_bytes")
    if not isinstance(facts, dict) or not isinstance(size_bytes, int) or size_bytes < 0:
        raise Broken("not a result")
    reserve(size_bytes)
    return Parsed(facts, receive_exactly(here, size_bytes))
