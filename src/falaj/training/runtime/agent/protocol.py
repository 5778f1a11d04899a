"""The agent protocol over a Unix socket or TLS: length-prefixed JSON, followed by a body of bytes.

FALAJ_AGENT is the path of a socket, or tls://HOST:PORT where the processes run on another machine than the platform;
FALAJ_AGENT_CERTIFICATE then names a file with the one certificate that the platform may present.

A frame is the length of its JSON (4 bytes, big-endian), the JSON object, and as many bytes as its member `body` says.
A request is `{"call": …, …}`; a response is `{"result": …}` or `{"error": code, "message": …}`. A call without a
response is sent again: all calls are idempotent, and `log` has an `id` for that.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, Self

from falaj.training.runtime.agent.agents import Agent, MetricValue, RunHistory, json_float
from falaj.training.runtime.agent.heartbeat import beat_for_job
from falaj.training.runtime.checkpointing.storage.remote import RemoteCheckpoints
from falaj.training.runtime.checkpointing.storage.store import Bytes, CheckpointStore, Retention, SaveId
from falaj.training.runtime.errors import (
    AgentLost,
    AgentRefused,
    CheckpointDamaged,
    CheckpointFailed,
    InvalidTraining,
    TrainingError,
)

MAX_JSON_BYTES = 1 << 20
METRICS_PER_CALL = 5_000  # stays below MAX_JSON_BYTES
RECONNECT_TIMEOUT_S = 60.0
"""Seconds that a run waits for an agent to return: a platform that restarts is back by then."""
REMOTE_RECONNECT_TIMEOUT_S = 600.0
"""As long, where the platform is on another machine: the lease of the attempt ends it before that."""
SECRET_VARIABLE = "FALAJ_AGENT_SECRET"
"""Has the secret of the attempt, which tells its processes from those of other jobs with the same uid."""
CERTIFICATE_VARIABLE = "FALAJ_AGENT_CERTIFICATE"
TLS_SCHEME = "tls://"
CONNECT_TIMEOUT_S = 10.0
LONGEST_PAUSE_S = 1.0
KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
MAX_ADDRESS_BYTES = 100  # the kernel takes 107 bytes
LOSS_FORMAT = struct.Struct("<qd")
"""Format of the loss of a step in the body of a response."""


class Stream(Protocol):
    """A buffered byte stream in both directions, as from `socket.makefile("rwb")`."""

    def read(self, size: int, /) -> bytes: ...
    def readinto(self, buffer: bytearray, /) -> int: ...
    def write(self, data: Bytes, /) -> int: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class SocketAgent:
    """The agent that the platform started beside the run, at the other end of `stream`.

    With a `path`, which may be tls://HOST:PORT, the connection is opened again when it is lost.
    """

    def __init__(
        self, stream: Stream, *, path: str | None = None, patience_s: float = RECONNECT_TIMEOUT_S
    ) -> None:
        self._stream, self._path, self._patience_s = stream, path, patience_s
        self._turn = threading.RLock()

    @classmethod
    def connect(cls, path: str, *, patience_s: float = RECONNECT_TIMEOUT_S) -> Self:
        return cls(open_stream(path, patience_s=patience_s), path=path, patience_s=patience_s)

    def log(self, metrics: Sequence[MetricValue]) -> None:
        for start in range(0, len(metrics), METRICS_PER_CALL):
            few = metrics[start : start + METRICS_PER_CALL]
            rows = [[m.step, m.name, json_float(m.value)] for m in few]
            self.call("log", metrics=rows, id=uuid.uuid4().hex)

    def params(self, values: Mapping[str, Any]) -> None:
        """Record parameters of the run; an existing one keeps its value."""
        self.call("params", params={str(name): _param(value) for name, value in values.items()})

    def load_history(self, after: int) -> RunHistory:
        resumes, losses = self.call("recall", after=after)
        return RunHistory(list(LOSS_FORMAT.iter_unpack(losses)), list(map(str, resumes)))

    def progress(self, step: int, total: int) -> None:
        self.call("progress", step=step, total=total)

    def heartbeat(self) -> bool:
        beat_for_job()
        return bool(self.call("heartbeat")[0])

    def notify(self, words: str) -> None:
        """Print to stderr, which is the log of the job."""
        print(words, file=sys.stderr, flush=True)

    def checkpoints(self) -> CheckpointStore:
        """Open a store on a connection of its own, so that a long part does not delay other calls."""
        if self._path is None:
            return RemoteCheckpoints(self, is_shared=True)
        own = self.connect(self._path, patience_s=self._patience_s)
        return RemoteCheckpoints(own, is_shared=False, is_remote=self._path.startswith(TLS_SCHEME))

    def close(self) -> None:
        self._stream.close()

    def call(self, name: str, body: Iterable[Bytes] = (), **values: Any) -> tuple[Any, bytearray]:
        """Return the result of a call, and the body of the response. `body` is iterated over more than once."""
        with self._turn:
            head, data = self._answered(name, body, values)
        for known in (AgentRefused, CheckpointDamaged, CheckpointFailed, InvalidTraining):
            if head.get("error") == known.code:
                raise known(head["message"])
        if "error" in head:
            raise AgentLost(f"the agent could not {name}: {head.get('message')}")
        return head["result"], data

    def _answered(
        self, name: str, body: Iterable[Bytes], values: Mapping[str, Any]
    ) -> tuple[dict[str, Any], bytearray]:
        went_away: float | None = None
        while True:
            try:
                return self._ask({"call": name, **values}, body)
            except (OSError, ValueError) as error:
                went_away = (
                    went_away or time.monotonic()
                )  # from the first failure on: sending a long part takes time
                left = went_away + self._patience_s - time.monotonic()
                if self._path is None or left <= 0:
                    raise AgentLost(f"lost the connection to the agent during {name}: {error}") from error
                with suppress(OSError, ValueError):
                    self._stream.close()
                self._stream = open_stream(self._path, patience_s=left)

    def _ask(self, call: dict[str, Any], body: Iterable[Bytes]) -> tuple[dict[str, Any], bytearray]:
        send(self._stream, call, body)
        answer = receive(self._stream)
        if answer is None:
            raise ConnectionResetError("the agent closed the connection")
        return answer


def open_stream(path: str, *, patience_s: float) -> Stream:
    """Connect to the agent at `path`, and wait for one that does not accept connections yet."""
    deadline, pause_s = time.monotonic() + patience_s, 0.05
    while True:
        try:
            with _connected(path) as connection:  # the stream keeps it open
                stream = _introduced(connection.makefile("rwb"))
                connection.settimeout(None)
                return stream
        except OSError as error:
            if not _may_answer_later(path, error) or time.monotonic() >= deadline:
                raise AgentLost(f"no agent answers at {path}: {error}") from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if path.startswith(TLS_SCHEME) else pause_s


def _may_answer_later(path: str, error: OSError) -> bool:
    if path.startswith(
        TLS_SCHEME
    ):  # names that are not resolved yet, and routes that are not there yet, included
        return not isinstance(error, _OtherCertificate | FileNotFoundError)
    return isinstance(error, ConnectionError | BlockingIOError)


def _introduced(stream: Stream) -> Stream:
    """Present the secret of the attempt, without which an agent of the platform answers nothing."""
    secret = os.environ.get(SECRET_VARIABLE)
    if secret:
        try:
            send(stream, {"call": "hello", "secret": secret, "attempt": _attempt()})
            answer = receive(stream)
            if answer is None:
                raise ConnectionResetError("the agent closed the connection")
            if "error" in answer[0]:
                raise AgentRefused(str(answer[0].get("message")))
        except BaseException:
            stream.close()
            raise
    return stream


def _attempt() -> str:
    """Return the name of the attempt that this process belongs to."""
    return f"{os.environ.get('FALAJ_JOB', '')}/{os.environ.get('FALAJ_ATTEMPT', '')}"


def _connected(path: str) -> socket.socket:
    if path.startswith(TLS_SCHEME):
        return _connected_over_tls(path.removeprefix(TLS_SCHEME), os.environ.get(CERTIFICATE_VARIABLE, ""))
    connection = socket.socket(socket.AF_UNIX)
    try:
        with_short_address(Path(path), connection.connect)
    except BaseException:
        connection.close()
        raise
    return connection


class _OtherCertificate(OSError):
    """The peer is not the platform, or its certificate was replaced."""


def _connected_over_tls(address: str, certificate: str) -> socket.socket:
    """Connect to HOST:PORT, whose certificate must be the one in the file `certificate`."""
    import ssl  # only where the platform is on another machine

    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself is compared
    context.load_verify_locations(certificate)
    pinned = ssl.PEM_cert_to_DER_cert(Path(certificate).read_text())
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S)
    try:
        keep_alive(connection)
        wrapped = context.wrap_socket(connection)
    except ssl.SSLCertVerificationError as error:
        connection.close()
        raise _OtherCertificate(f"{address} presents another certificate: {error.reason}") from error
    except BaseException:
        connection.close()
        raise
    if wrapped.getpeercert(binary_form=True) != pinned:
        wrapped.close()
        raise _OtherCertificate(f"{address} presents another certificate")
    return wrapped


def keep_alive(connection: socket.socket) -> None:
    """Let a connection fail within a minute after its peer has vanished without a word."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def with_short_address(path: Path, use: Callable[[str], object]) -> None:
    """Call `use` with an address of the socket at `path` that is short enough for the kernel."""
    if len(os.fsencode(path)) <= MAX_ADDRESS_BYTES:
        use(str(path))
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        use(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def _param(value: object) -> bool | int | float | str:
    """Return a parameter as a number, string or bool; other values as strings."""
    return (
        value
        if isinstance(value, bool | int | str)
        else json_float(value)
        if isinstance(value, float)
        else str(value)
    )


def serve_calls(stream: Stream, agent: Agent) -> None:
    """Serve the calls of a run through `agent`, until the run closes the stream."""
    while (frame := receive(stream)) is not None:
        head, body = frame
        try:
            result, data = _perform(agent, head, body)
        except TrainingError as error:
            send(stream, {"error": error.code, "message": error.message})
        except (OSError, KeyError, TypeError, ValueError) as error:
            send(stream, {"error": AgentLost.code, "message": repr(error)})
        else:
            send(stream, {"result": result}, [data])


def _perform(agent: Agent, head: dict[str, Any], body: bytearray) -> tuple[Any, Bytes]:
    match head:
        case {"call": "log", "metrics": metrics}:
            agent.log([MetricValue(int(step), str(name), float(value)) for step, name, value in metrics])
        case {"call": "params", "params": dict(params)}:
            agent.params(params)
        case {"call": "recall", "after": int(after)}:
            past = agent.load_history(after)
            return past.resumes, b"".join(LOSS_FORMAT.pack(*each) for each in past.losses)
        case {"call": "progress", "step": int(step), "total": int(total)}:
            agent.progress(step, total)
        case {"call": "heartbeat"}:
            return agent.heartbeat(), b""
        case {"call": "say", "words": str(words)}:
            agent.notify(words)
        case _:
            return _keep(agent.checkpoints(), head, body)
    return None, b""


def _keep(store: CheckpointStore, head: dict[str, Any], body: bytearray) -> tuple[Any, Bytes]:
    match head:
        case {"call": "checkpoint_steps"}:
            return store.steps(), b""
        case {"call": "save_part", "step": int(step), "save": str(save), "number": int(number)}:
            store.save_part(SaveId(step, save), number, [memoryview(body)])
        case {"call": "commit_checkpoint", "step": int(step), "save": str(save), "sizes": list(sizes)}:
            retention = Retention(int(head["keep"]), head.get("best"))
            store.commit(SaveId(step, save), sizes, bytes(body), retention)
        case {"call": "load_manifest", "step": int(step)}:
            return None, store.load_manifest(step)
        case {"call": "load_part", "step": int(step), "number": int(number)}:
            data = store.load_part(step, number, offset=head["offset"], length=head["length"])
            return None, memoryview(data)
        case _:
            raise ValueError(f"unknown call {head.get('call')!r}")
    return None, b""


def send(stream: Stream, head: dict[str, Any], body: Iterable[Bytes] = ()) -> None:
    """Write one frame."""
    send_head(stream, head, sum(len(part) for part in body))
    for part in body:
        stream.write(part)
    stream.flush()


def send_head(stream: Stream, head: dict[str, Any], size: int) -> None:
    """Write the head of a frame; `size` bytes of body follow."""
    text = json.dumps({**head, "body": size}, allow_nan=False).encode()
    stream.write(len(text).to_bytes(4, "big") + text)


def receive(stream: Stream) -> tuple[dict[str, Any], bytearray] | None:
    """Return the next frame, or None at the end of the stream. Raise ValueError for one that is cut or too long."""
    head = receive_head(stream)
    if head is None:
        return None
    body = bytearray(head["body"])
    if stream.readinto(body) != len(body):
        raise ValueError("the stream ended inside a frame")
    return head, body


def receive_head(stream: Stream) -> dict[str, Any] | None:
    """Return the head of the next frame; its body of `body` bytes is still to be read."""
    text = receive_text(stream)
    return None if text is None else parse_head(text)


def receive_text(stream: Stream, *, limit: int = MAX_JSON_BYTES) -> bytes | None:
    """Return the JSON of the next frame unparsed: the parsed value may be many times as large."""
    prefix = stream.read(4)
    if not prefix:
        return None
    size = int.from_bytes(prefix, "big")
    if len(prefix) < 4 or size > limit:
        raise ValueError(f"a frame of {size} bytes; at most {limit}")
    return stream.read(size)


def parse_head(text: bytes) -> dict[str, Any]:
    try:
        head = json.loads(text)
    except RecursionError as error:
        raise ValueError("a frame's JSON is too deep") from error
    if not isinstance(head, dict) or not isinstance(head.get("body"), int) or head["body"] < 0:
        raise ValueError("a frame must be a JSON object with the length of its body")
    return head


def platform_agent() -> SocketAgent | None:
    """Return the agent whose socket or address is named in FALAJ_AGENT; None without one."""
    path = os.environ.get("FALAJ_AGENT")
    if not path:
        return None
    is_remote = path.startswith(TLS_SCHEME)
    return SocketAgent.connect(
        path, patience_s=REMOTE_RECONNECT_TIMEOUT_S if is_remote else RECONNECT_TIMEOUT_S
    )
