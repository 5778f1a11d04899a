"""Serves agents to the processes of attempts: on a unix socket of each attempt, or over TLS to other machines.

Frames come from user code, and before the secret of an attempt was presented from anybody: each is checked, and nothing
large is held in memory.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from falaj.control.jobs.staging import make_readable
from falaj.errors import FalajError, Fenced, Interrupted, InvalidInput, TooLarge, Unavailable
from falaj.governance.operations.caller import start_thread
from falaj.training.runtime.agent.protocol import (
    Stream,
    keep_alive,
    parse_head,
    receive_text,
    send_head,
    with_short_address,
)
from falaj.training.runtime.checkpointing.storage.store import MAX_PARTS
from falaj.training.runtime.errors import (
    AgentLost,
    AgentRefused,
    CheckpointDamaged,
    CheckpointFailed,
    InvalidTraining,
)

log = logging.getLogger("falaj.controller")

CHUNK_BYTES = 1 << 20
LONGEST_MESSAGE = 10_000
ACCEPT_AGAIN_S = 0.1
SOCKET = "agent.sock"
MOST_CONNECTIONS = 300
"""Of one attempt."""
MOST_AT_ONCE = 8
"""Frames of an attempt that are handled at a time: a megabyte of JSON can become thirty of objects."""
MOVES_BYTES = (
    *("save_part", "commit_checkpoint", "load_manifest", "load_part"),
    *("append_log", "save_output", "save_packages"),
)
CHECKPOINT_FIELDS = ("call", "step", "body", "save", "number", "keep", "best", "offset", "length")
WORKER_FIELDS = ("node_rank", "pod", "path", "sha256")
LONGEST_FIELD = 500

PEER = struct.Struct("iII")
"""Credentials of the peer, from the kernel: pid, uid, gid."""

HELLO_BYTES = 2_000
HELLO_TIMEOUT_S = 10.0
BIND_PATIENCE_S = 10.0
MOST_NEWCOMERS = 100
"""Connections from other machines that have not presented a secret yet; the oldest leaves for a new one."""

Answer = tuple[Any, int, Iterator[bytes]]
Reply = tuple[dict[str, Any], int, Iterator[bytes]]


class CallHandler(Protocol):
    """Answers the calls of one attempt."""

    def answer(self, head: dict[str, Any], body: Iterator[bytes]) -> Answer:
        """Return the result of a call, and the size and the bytes of the body that follows it."""
        ...


class AgentSession:
    """Answers the frames of all connections of one attempt, until it is closed."""

    def __init__(self, agent: CallHandler, *, on_fenced: Callable[[], None]) -> None:
        self._agent, self._on_fenced = agent, on_fenced
        self._slots = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._open: set[socket.socket] = set()
        self._closed = threading.Event()

    def close(self) -> None:
        self._closed.set()
        for each in tuple(self._open):
            _shut(each)

    def serve(self, connection: socket.socket, stream: Stream) -> None:
        """Answer frames until the peer closes the stream. Its secret was presented."""
        if len(self._open) >= MOST_CONNECTIONS:
            return
        self._open.add(connection)
        try:
            while not self._closed.is_set() and self._answer_next(stream):
                pass
        except Fenced:
            self._on_fenced()
        finally:
            self._open.discard(connection)

    def _answer_next(self, stream: Stream) -> bool:
        """Read the next frame and answer it. Return False at the end of the stream.

        Large frames are held by few connections at a time, and by none that waits for its peer.
        """
        text, reply = receive_text(stream), None
        if text is None:
            return False
        with self._slots:
            head = parse_head(text)
            del text
            if head.get("call") in MOVES_BYTES:
                head = shorten_head(head)
            elif head["body"]:
                raise ValueError(f"a body of {head['body']} bytes with {head.get('call')!r}")
            else:
                reply, head = self._reply(head, iter(())), {"body": 0}
        body = FrameBody(stream, head["body"])
        answer, size, data = reply or self._reply(head, body.pieces())
        body.skip()
        send_head(stream, answer, size)
        for piece in pad(data, size):
            stream.write(piece)
        stream.flush()
        return True

    def _reply(self, head: dict[str, Any], body: Iterator[bytes]) -> Reply:
        try:
            result, size, data = self._agent.answer(head, body)
        except (AgentRefused, CheckpointDamaged, CheckpointFailed, InvalidTraining) as error:
            return {"error": error.code, "message": error.message}, 0, iter(())
        except TooLarge as error:
            return {"error": CheckpointFailed.code, "message": error.message}, 0, iter(())
        except Unavailable as error:
            raise ConnectionError(
                error.message
            ) from error  # the runtime repeats the call, as after a restart
        except (Fenced, Interrupted):
            raise
        except (FalajError, KeyError, OverflowError, TypeError, ValueError) as error:
            return {"error": _code(head, error), "message": str(error)[:LONGEST_MESSAGE]}, 0, iter(())
        return {"result": result}, size, data


class ConnectionAcceptor:
    """Accepts connections on `listener`, each in a thread of its own, until it is closed."""

    def __init__(
        self,
        listener: socket.socket,
        serve: Callable[[socket.socket], None],
        *,
        admit: Callable[[socket.socket], socket.socket | None],
    ) -> None:
        """`admit` returns a new connection as it is to be served; none to close it."""
        self._listener, self._serve, self._admit = listener, serve, admit
        self._open: set[socket.socket] = set()
        self._closed = threading.Event()

    def start(self) -> None:
        start_thread(self._accept, name="agent-server")

    @property
    def count(self) -> int:
        return len(self._open)

    def close(self) -> None:
        self._closed.set()
        for each in [self._listener, *self._open]:
            _shut(each)
            each.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # it was closed; or there are too many open files just now
                self._closed.wait(ACCEPT_AGAIN_S)
                continue
            admitted = None
            with suppress(OSError):  # the peer has gone already
                admitted = self._admit(connection)
            if admitted is None:
                connection.close()
                continue
            self._open.add(admitted)
            start_thread(self._run, admitted, name="agent")

    def _run(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        except (OSError, ValueError, Interrupted) as error:
            log.debug("connection to agent ended", extra={"reason": str(error)[:200]})
        except Exception:
            log.exception("agent connection failed")
        finally:
            self._open.discard(connection)
            connection.close()


class AgentServer:
    """Serves an agent on a socket in `folder` until it is closed.

    The folder belongs to the platform: user code could replace it by a link. Clients must have the uid that owns
    `home`, the job's directory, and present `secret` first: jobs can see each other's sockets, and have the same uid
    under some sandboxes.
    """

    def __init__(
        self,
        folder: Path,
        agent: CallHandler,
        *,
        home: Path,
        on_fenced: Callable[[], None],
        secret: str | None = None,
    ) -> None:
        self._secret = secret
        self._session = AgentSession(agent, on_fenced=on_fenced)
        self._connections = ConnectionAcceptor(
            _listen(folder),
            self._serve,
            admit=lambda peer: peer if self._admits(peer, home) else None,
        )
        self._connections.start()

    def close(self) -> None:
        self._session.close()
        self._connections.close()

    def _admits(self, peer: socket.socket, home: Path) -> bool:
        return self._connections.count < MOST_CONNECTIONS and is_owner(peer, home)

    def _serve(self, connection: socket.socket) -> None:
        with connection.makefile("rwb") as stream:
            if self._secret is None or self._is_introduced(stream, self._secret):
                self._session.serve(connection, stream)

    def _is_introduced(self, stream: Stream, secret: str) -> bool:
        """Read the first frame, and return whether it presents the secret."""
        text = receive_text(stream)
        head = {} if text is None else parse_head(text)
        if not is_secret(head.get("secret"), secret):
            log.warning("connection to agent refused: it does not present the secret of the attempt")
            return False
        _welcome(stream)
        return True


class RemoteAgentServer:
    """Serves the agents of all attempts of this controller over TLS at `address`, until it is closed.

    A peer presents the name of its attempt and that attempt's secret first. Before that, only so many bytes are read
    from it, for a limited time, and of many such peers the oldest are dropped. One whose attempt is over is told so;
    one whose attempt is not served yet, because the controller has just started, is to come again.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        certificate: Path,
        key: Path,
        secret_of: Callable[[str], str | None],
        is_current: Callable[[str], bool],
        on_fenced: Callable[[], None],
    ) -> None:
        """`secret_of` returns the secret of an attempt, none for what is not the name of one; `is_current` tells
        whether an attempt may still run."""
        self._secret_of, self._is_current, self._on_fenced = secret_of, is_current, on_fenced
        self._sessions: dict[str, AgentSession] = {}
        self._newcomers: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_3
        self._tls.load_cert_chain(certificate, key)
        listener = _listen_at(address)
        self.port = int(listener.getsockname()[1])
        self._connections = ConnectionAcceptor(listener, self._serve, admit=self._admit)
        self._connections.start()

    @contextmanager
    def serving(self, attempt: str, agent: CallHandler) -> Iterator[None]:
        """Serve the agent of an attempt for as long as the context is open."""
        session = AgentSession(agent, on_fenced=self._on_fenced)
        self._sessions[attempt] = session
        try:
            yield
        finally:
            if self._sessions.get(attempt) is session:
                del self._sessions[attempt]
            session.close()

    def close(self) -> None:
        for session in tuple(self._sessions.values()):
            session.close()
        self._connections.close()

    def _admit(self, connection: socket.socket) -> socket.socket:
        """Count a newcomer, and drop those that waited too long or that it displaces."""
        keep_alive(connection)
        connection.settimeout(HELLO_TIMEOUT_S)
        secured = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        now = time.monotonic()
        with self._lock:
            late = [each for each, since in self._newcomers.items() if now - since > HELLO_TIMEOUT_S]
            late = late or list(self._newcomers)[: max(0, len(self._newcomers) - MOST_NEWCOMERS + 1)]
            for each in late:
                del self._newcomers[each]
            self._newcomers[secured] = now
        for each in late:
            _shut(each)
        return secured

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.do_handshake()  # type: ignore[attr-defined]
            with connection.makefile("rwb") as stream:
                session = self._introduced(stream)
                if session is not None and self._keep(connection):
                    connection.settimeout(None)
                    session.serve(connection, stream)
        finally:
            self._keep(connection)

    def _keep(self, connection: socket.socket) -> bool:
        """Return whether a peer was still among the newcomers; it no longer is."""
        with self._lock:
            return self._newcomers.pop(connection, None) is not None

    def _introduced(self, stream: Stream) -> AgentSession | None:
        """Read the first frame, and return the session of the attempt whose secret it presents."""
        text = receive_text(stream, limit=HELLO_BYTES)
        head = {} if text is None else parse_head(text)
        attempt = head.get("attempt")
        secret = self._secret_of(attempt) if isinstance(attempt, str) else None
        if head.get("body") or secret is None or not is_secret(head.get("secret"), secret):
            log.warning("connection to agent refused: it does not present the secret of an attempt")
            _refuse(stream, "it does not present the name and the secret of an attempt")
            return None
        session = self._sessions.get(str(attempt))
        if session is not None:
            _welcome(stream)
        elif not self._is_current(str(attempt)):
            _refuse(stream, f"attempt {attempt} is over")
        return session


def _listen_at(address: tuple[str, int]) -> socket.socket:
    """Return a listener; an earlier controller that has not quite ended may hold the port for a moment."""
    deadline = time.monotonic() + BIND_PATIENCE_S
    while True:
        try:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            return socket.create_server(address, family=family, backlog=256)
        except OSError as error:
            if time.monotonic() > deadline:
                where = f"{address[0]}:{address[1]}"
                raise Unavailable(
                    f"cannot listen at {where} for the pods of jobs: {error.strerror}"
                ) from error
        time.sleep(ACCEPT_AGAIN_S)


def is_secret(given: object, secret: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), secret.encode())


def _welcome(stream: Stream) -> None:
    send_head(stream, {"result": None}, 0)
    stream.flush()


def _refuse(stream: Stream, why: str) -> None:
    send_head(stream, {"error": AgentRefused.code, "message": why}, 0)
    stream.flush()


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def shorten_head(head: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers and short strings of a head whose body is still to come."""
    sizes = head.get("sizes")
    is_short = isinstance(sizes, list) and len(sizes) <= MAX_PARTS
    kept = {name: head.get(name) for name in CHECKPOINT_FIELDS + WORKER_FIELDS}
    return ({"sizes": sizes} if is_short else {}) | {
        name: value
        for name, value in kept.items()
        if isinstance(value, int) or (isinstance(value, str) and len(value) <= LONGEST_FIELD)
    }


class FrameBody:
    """The body of a frame: read piece by piece, and to its end before the next frame."""

    def __init__(self, stream: Stream, size: int) -> None:
        self._stream = stream
        self.left = size

    def pieces(self) -> Iterator[bytes]:
        while self.left:
            piece = self._stream.read(min(self.left, CHUNK_BYTES))
            if not piece:
                raise Interrupted("the job closed the connection inside a frame")
            self.left -= len(piece)
            yield piece

    def skip(self) -> None:
        for _ in self.pieces():
            pass


def pad(data: Iterator[bytes], size: int) -> Iterator[bytes]:
    """Yield `size` bytes: zeros from where the stored ones are damaged. The runtime verifies them."""
    sent = 0
    try:
        for piece in data:
            sent += len(piece)
            yield piece
    except FalajError as error:
        log.warning("checkpoint could not be read completely", extra={"reason": error.message})
    while sent < size:
        missing = min(size - sent, CHUNK_BYTES)
        sent += missing
        yield bytes(missing)


def is_owner(connection: socket.socket, home: Path) -> bool:
    """Return whether the peer has the uid that owns `home`."""
    if sys.platform != "linux":
        return True  # only on Linux jobs have their own uids
    try:
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        return bool(PEER.unpack(peer)[1] == home.stat().st_uid)
    except OSError:
        return False


def _listen(folder: Path) -> socket.socket:
    """Return a socket that the job may connect to; it replaces an earlier one atomically."""
    make_readable(folder)
    draft = folder / f".{os.getpid()}"
    draft.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    try:
        with_short_address(draft, listener.bind)
        draft.chmod(0o666)
        listener.listen(64)
        draft.rename(folder / SOCKET)
    except BaseException:
        listener.close()
        raise
    return listener


def _code(head: dict[str, Any], error: Exception) -> str:
    """Return the error code for the runtime: an invalid call, or an agent that cannot do it."""
    is_loading = head.get("call") in ("load_manifest", "load_part")
    if is_loading and isinstance(error, FalajError):
        return CheckpointDamaged.code
    known = isinstance(error, FalajError) and not isinstance(error, InvalidInput)
    return AgentLost.code if known else InvalidTraining.code
