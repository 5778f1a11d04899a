"""The agent of a running attempt: a unix socket through which the runtime calls the platform's operations.

Frames come from user code: each is checked, nothing large is held in memory, and every effect is an operation on behalf
of the job's owner.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from falaj.control.authorization import acting
from falaj.control.jobs.checkpoints import CheckpointUploads
from falaj.control.jobs.storage_limits import StorageLimits
from falaj.control.services import Services
from falaj.errors import (
    Denied,
    FalajError,
    Fenced,
    Interrupted,
    InvalidInput,
    NotFound,
    TooLarge,
    Unavailable,
)
from falaj.governance.operations.caller import Caller, start_thread
from falaj.records.names import ObjectId
from falaj.records.tracking import BATCH_POINTS, MetricPoint
from falaj.tracking.service import Runs
from falaj.training.runs import CONTINUES_RUN
from falaj.training.runtime.agent.agents import RESUME_PREFIX
from falaj.training.runtime.agent.protocol import (
    LOSS_FORMAT,
    Stream,
    parse_head,
    receive_text,
    send_head,
    with_short_address,
)
from falaj.training.runtime.checkpointing.storage.store import MAX_PARTS, SaveId
from falaj.training.runtime.errors import AgentLost, CheckpointDamaged, CheckpointFailed, InvalidTraining
from falaj.training.store import JobRow

log = logging.getLogger("falaj.controller")

CHUNK_BYTES = 1 << 20
LONGEST_MESSAGE = 10_000
ACCEPT_AGAIN_S = 0.1
SOCKET = "agent.sock"
MOST_CONNECTIONS = 300
MOST_AT_ONCE = 8
"""Frames of an attempt that are handled at a time: a megabyte of JSON can become thirty of objects."""
MOVES_BYTES = ("save_part", "commit_checkpoint", "load_manifest", "load_part")
CHECKPOINT_FIELDS = ("call", "step", "body", "save", "number", "keep", "best", "offset", "length")
LONGEST_FIELD = 100

PEER = struct.Struct("iII")
"""Credentials of the peer, from the kernel: pid, uid, gid."""

MOST_LOSSES = 100_000
"""At most so many losses are returned, the first ones after a step."""
MOST_RESUMES = 5_000
MOST_RUNS = 100
"""At most so many runs of a job are read, the newest ones; each retry starts one."""

Reply = tuple[dict[str, Any], int, Iterator[bytes]]


class PlatformAgent:
    """Handles the calls of an attempt on behalf of the job's owner."""

    def __init__(
        self,
        services: Services,
        row: JobRow,
        *,
        workspace: ObjectId,
        owner: Callable[[], Caller],
        service: Caller,
        fence: int,
        may_continue: Callable[[], bool],
        on_progress: Callable[[int, int], None],
        on_metrics: Callable[[Sequence[MetricPoint]], None] = lambda _points: None,
        limits: StorageLimits | None = None,
    ) -> None:
        """`owner` is called for each operation, and raises if they may no longer act."""
        self._services, self._row, self._workspace = services, row, workspace
        self._owner, self._service, self._fence = owner, service, fence
        self._may_continue, self._on_progress, self._on_metrics = may_continue, on_progress, on_metrics
        self._checkpoints = CheckpointUploads(
            services,
            row.id,
            row.attempt,
            workspace=workspace,
            owner=owner,
            service=service,
            fence=fence,
            limits=limits or StorageLimits(),
        )

    def answer(self, head: dict[str, Any], body: Iterator[bytes]) -> tuple[Any, int, Iterator[bytes]]:
        """Return the result of a call, and the size and the bytes of the body that follows it."""
        match head:
            case {"call": "log", "metrics": list(metrics)}:
                self._log(metrics, head.get("id"))
            case {"call": "params", "params": dict(params)}:
                self._log_params(params)
            case {"call": "recall", "after": int(after)}:
                with acting(self._owner(), fence=self._fence):
                    resumes, losses = read_run_history(
                        self._services.runs, self._row.run, after=_count(after)
                    )
                return resumes, len(losses), iter((losses,))
            case {"call": "progress", "step": int(step), "total": int(total)}:
                self._on_progress(_count(step), _count(total))
            case {"call": "heartbeat"}:
                return self._may_continue(), 0, iter(())
            case {"call": "say", "words": str()}:
                pass  # its output is its log
            case {"call": "checkpoint_steps"}:
                return self._checkpoints.steps(), 0, iter(())
            case {"call": "save_part", "step": int(step), "save": str(save), "number": int(number)}:
                self._checkpoints.save_part(SaveId(step, save), number, body, size=head["body"])
            case {"call": "commit_checkpoint", "step": int(step), "save": str(save), "keep": int(keep)}:
                best = None if head.get("best") is None else int(head["best"])
                sizes, size = _sizes(head), head["body"]
                self._checkpoints.commit(SaveId(step, save), sizes, body, size=size, keep=keep, best=best)
            case {"call": "load_manifest", "step": int(step)}:
                return None, *self._checkpoints.load_manifest(step)
            case {"call": "load_part", "step": int(step), "number": int(number)}:
                where = {"offset": int(head["offset"]), "length": int(head["length"])}
                return None, *self._checkpoints.load_part(step, number, **where)
            case _:
                raise ValueError(f"unknown call {head.get('call')!r}")
        return None, 0, iter(())

    def _log(self, metrics: list[Any], batch: Any) -> None:
        if len(metrics) > BATCH_POINTS:
            raise ValueError(f"{len(metrics)} metrics at once; at most {BATCH_POINTS}")
        points = tuple(
            MetricPoint(key=str(name), value=float(value), step=int(step)) for step, name, value in metrics
        )
        if points:
            named = f"{self._row.id}.{batch}"[:100] if isinstance(batch, str) else None
            with acting(self._owner(), fence=self._fence):
                self._services.runs.log_metrics(self._row.run, points, batch=named)
            self._on_metrics(points)

    def _log_params(self, params: dict[str, Any]) -> None:
        with acting(self._owner(), fence=self._fence):
            known = {each.key for each in self._services.runs.show(self._row.run).params}
            new = {key: value for key, value in params.items() if key not in known}
            if new:
                self._services.runs.log_params(self._row.run, new)


class AgentServer:
    """Serves an agent on a socket in `folder` until it is closed. Each connection has a thread of its own.

    The folder belongs to the platform: user code could replace it by a link. Clients must have the uid that owns
    `home`, the job's directory: jobs with different uids can see each other's sockets.
    """

    def __init__(
        self, folder: Path, agent: PlatformAgent, *, home: Path, on_fenced: Callable[[], None]
    ) -> None:
        self._agent = agent
        self._home = home
        self._slots = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._on_fenced = on_fenced
        self._open: set[socket.socket] = set()
        self._closed = threading.Event()
        self._listener = _listen(folder)
        start_thread(self._accept, name="agent-server")

    def close(self) -> None:
        self._closed.set()
        for each in [self._listener, *self._open]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # it was closed; or there are too many open files just now
                self._closed.wait(ACCEPT_AGAIN_S)
                continue
            if len(self._open) >= MOST_CONNECTIONS or not is_owner(connection, self._home):
                connection.close()
                continue
            self._open.add(connection)
            start_thread(self._serve, connection, name="agent")

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rwb") as stream:
                while not self._closed.is_set() and self._answer_next(stream):
                    pass
        except Fenced:
            self._on_fenced()
        except (OSError, ValueError, Interrupted) as error:
            log.debug("connection to agent ended", extra={"reason": str(error)[:200]})
        except Exception:
            log.exception("agent connection failed")
        finally:
            self._open.discard(connection)
            connection.close()

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
        except (CheckpointDamaged, CheckpointFailed, InvalidTraining) as error:
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


def shorten_head(head: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers and short strings of a head whose body is still to come."""
    sizes = head.get("sizes")
    is_short = isinstance(sizes, list) and len(sizes) <= MAX_PARTS
    kept = {name: head.get(name) for name in CHECKPOINT_FIELDS}
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
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    folder.chmod(0o755)  # the job may have another uid; the folders above are closed to everyone else
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


def _sizes(head: dict[str, Any]) -> list[int]:
    found = head.get("sizes")
    if not isinstance(found, list) or not all(type(each) is int and 0 <= each < 1 << 62 for each in found):
        raise ValueError(f"`sizes` must be a list of at most {MAX_PARTS} sizes in bytes")
    return found


def _count(number: int) -> int:
    if not 0 <= number < 1 << 62:
        raise ValueError("a step must be at least 0 and fit into 62 bits")
    return number


def _code(head: dict[str, Any], error: Exception) -> str:
    """Return the error code for the runtime: an invalid call, or an agent that cannot do it."""
    is_loading = head.get("call") in ("load_manifest", "load_part")
    if is_loading and isinstance(error, FalajError):
        return CheckpointDamaged.code
    known = isinstance(error, FalajError) and not isinstance(error, InvalidInput)
    return AgentLost.code if known else InvalidTraining.code


# ------------------------------------------------------------------------------------------ run history


def read_run_history(runs: Runs, run: ObjectId, *, after: int) -> tuple[list[str], bytes]:
    """Return the resumes of a job and the losses of its runs after a step, packed for the runtime's call `recall`.

    Runs that the caller may not read are left out.
    """
    params = _params(runs, run)
    resumes = [value for key, value in params.items() if key.startswith(RESUME_PREFIX)]
    packed = bytearray()
    for each in reversed(_chain(runs, run, params)):
        with suppress(Denied, NotFound):  # the user who retried the job may not read runs of others
            _pack_losses(runs, each, after, packed)
    return resumes[:MOST_RESUMES], bytes(packed)


def _chain(runs: Runs, run: str, params: dict[str, str]) -> list[str]:
    """Return the run and those that it continues, as far as they are visible, newest first."""
    found = [run]
    with suppress(Denied, NotFound):
        while (before := params.get(CONTINUES_RUN)) and before not in found and len(found) < MOST_RUNS:
            params = _params(runs, before)
            found.append(before)
    return found


def _params(runs: Runs, run: str) -> dict[str, str]:
    return {each.key: each.value for each in runs.show(run).params}


def _pack_losses(runs: Runs, run: str, after: int, packed: bytearray) -> None:
    for batch in runs.metrics(run, "loss", from_step=after + 1):
        steps, values = (batch.column(name).to_pylist() for name in ("step", "value"))
        for each in zip(steps, values, strict=True):
            if len(packed) >= MOST_LOSSES * LOSS_FORMAT.size:
                return
            packed += LOSS_FORMAT.pack(*each)
