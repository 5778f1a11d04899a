"""The agent beside a running attempt: a unix socket in a folder that it may read, and the platform's operations behind.

What comes from there is user code's: every frame is checked, nothing large is held in memory, and every effect is an
operation of the job's owner.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from falaj.control.authorization import acting
from falaj.control.jobs.checkpoints import CheckpointUploads
from falaj.control.jobs.storage_limits import StorageLimits
from falaj.control.services import Services
from falaj.errors import FalajError, Fenced, Interrupted, InvalidInput, TooLarge, Unavailable
from falaj.governance.operations.caller import Caller, start_thread
from falaj.records.names import ObjectId
from falaj.records.tracking import BATCH_POINTS, MetricPoint
from falaj.training.runtime.agent.protocol import (
    Stream,
    parse_head,
    receive_text,
    send_head,
    with_short_address,
)
from falaj.training.runtime.checkpointing.storage.store import MAX_PARTS, SaveId
from falaj.training.runtime.errors import AgentLost, CheckpointDamaged, CheckpointFailed, InvalidTraining

log = logging.getLogger("falaj.controller")

CHUNK_BYTES = 1 << 20
LONGEST_WORDS = 10_000
AGAIN_S = 0.1
SOCKET = "agent.sock"
MOST_CONNECTIONS = 300
MOST_AT_ONCE = 8
"""So many frames of an attempt are parsed and answered at a time: a megabyte of JSON can make thirty of objects."""
MOVES_BYTES = ("save_part", "commit_checkpoint", "load_manifest", "load_part")
WORDS_OF_CHECKPOINTS = ("call", "step", "body", "save", "number", "keep", "best", "offset", "length")
LONGEST_WORD = 100

PEER = struct.Struct("iII")
"""What the kernel knows of the other end: pid, uid, gid."""

Reply = tuple[dict[str, Any], int, Iterator[bytes]]


class PlatformAgent:
    """Does what an attempt asks, for the job's owner."""

    def __init__(
        self,
        services: Services,
        row: Mapping[str, Any],
        *,
        workspace: ObjectId,
        owner: Callable[[], Caller],
        service: Caller,
        fence: int,
        wanted: Callable[[], bool],
        progress: Callable[[int, int], None],
        measured: Callable[[Sequence[MetricPoint]], None] = lambda _points: None,
        limits: StorageLimits | None = None,
    ) -> None:
        """`owner` is asked each time, and raises where they may no longer act. `measured` is told of metrics."""
        self._services, self._row, self._workspace = services, row, workspace
        self._owner, self._service, self._fence = owner, service, fence
        self._wanted, self._progress, self._measured = wanted, progress, measured
        self._desk = CheckpointUploads(
            services,
            row["id"],
            row["attempt"],
            workspace=workspace,
            owner=owner,
            service=service,
            fence=fence,
            limits=limits or StorageLimits(),
        )

    def answer(self, head: dict[str, Any], body: Iterator[bytes]) -> tuple[Any, int, Iterator[bytes]]:
        """The result of a call, and the bytes that go with it."""
        match head:
            case {"call": "log", "metrics": list(metrics)}:
                self._log(metrics, head.get("id"))
            case {"call": "params", "params": dict(params)}:
                self._log_params(params)
            case {"call": "recall", "after": int(after)}:
                with acting(self._owner(), fence=self._fence):
                    resumes, losses = read_run_history(
                        self._services.runs, self._row["run"], after=_count(after)
                    )
                return resumes, len(losses), iter((losses,))
            case {"call": "progress", "step": int(step), "total": int(total)}:
                self._progress(_count(step), _count(total))
            case {"call": "heartbeat"}:
                return self._wanted(), 0, iter(())
            case {"call": "say", "words": str()}:
                pass  # what it prints is its log
            case {"call": "checkpoint_steps"}:
                return self._desk.steps(), 0, iter(())
            case {"call": "save_part", "step": int(step), "save": str(save), "number": int(number)}:
                self._desk.save_part(SaveId(step, save), number, body, size=head["body"])
            case {"call": "commit_checkpoint", "step": int(step), "save": str(save), "keep": int(keep)}:
                best = None if head.get("best") is None else int(head["best"])
                sizes, size = _sizes(head), head["body"]
                self._desk.commit(SaveId(step, save), sizes, body, size=size, keep=keep, best=best)
            case {"call": "load_manifest", "step": int(step)}:
                return None, *self._desk.load_manifest(step)
            case {"call": "load_part", "step": int(step), "number": int(number)}:
                where = {"offset": int(head["offset"]), "length": int(head["length"])}
                return None, *self._desk.load_part(step, number, **where)
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
            named = f"{self._row['id']}.{batch}"[:100] if isinstance(batch, str) else None
            with acting(self._owner(), fence=self._fence):
                self._services.runs.log_metrics(self._row["run"], points, batch=named)
            self._measured(points)

    def _log_params(self, params: dict[str, Any]) -> None:
        with acting(self._owner(), fence=self._fence):
            known = {each.key for each in self._services.runs.show(self._row["run"]).params}
            new = {key: value for key, value in params.items() if key not in known}
            if new:
                self._services.runs.log_params(self._row["run"], new)


class AgentServer:
    """Serves an agent on a socket in `folder` until it is closed. Each connection has a thread of its own.

    The folder is the platform's own: where user code can change it, a link could lead us astray. Whoever connects must
    have the uid that owns `home`, the job's directory: jobs that are kept apart by their uids see each other's sockets.
    """

    def __init__(
        self, folder: Path, agent: PlatformAgent, *, home: Path, on_fenced: Callable[[], None]
    ) -> None:
        self._agent = agent
        self._home = home
        self._turns = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._on_fenced = on_fenced
        self._open: set[socket.socket] = set()
        self._closed = threading.Event()
        self._listener = _listen(folder)
        start_thread(self._accept, name="agent-door")

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
                self._closed.wait(AGAIN_S)
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
            log.debug("a job's connection to its agent ended", extra={"reason": str(error)[:200]})
        except Exception:
            log.exception("a job's agent broke")
        finally:
            self._open.discard(connection)
            connection.close()

    def _answer_next(self, stream: Stream) -> bool:
        """Take the next frame and answer it; False at the end.

        Whatever is large is held by few connections at a time, and by none that waits for the other end.
        """
        text, reply = receive_text(stream), None
        if text is None:
            return False
        with self._turns:
            head = parse_head(text)
            del text
            if head.get("call") in MOVES_BYTES:
                head = shorten_head(head)
            elif head["body"]:
                raise ValueError(f"a body of {head['body']} bytes with {head.get('call')!r}")
            else:
                reply, head = self._reply(head, iter(())), {"body": 0}
        body = FrameBody(stream, head["body"])
        said, size, data = reply or self._reply(head, body.pieces())
        body.skip()
        send_head(stream, said, size)
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
            raise ConnectionError(error.message) from error  # it asks again, as after a restart
        except (Fenced, Interrupted):
            raise
        except (FalajError, KeyError, OverflowError, TypeError, ValueError) as error:
            return {"error": _code(head, error), "message": str(error)[:LONGEST_WORDS]}, 0, iter(())
        return {"result": result}, size, data


def shorten_head(head: dict[str, Any]) -> dict[str, Any]:
    """What matters of a head whose body is still to come: a few numbers and short words."""
    sizes = head.get("sizes")
    is_short = isinstance(sizes, list) and len(sizes) <= MAX_PARTS
    kept = {name: head.get(name) for name in WORDS_OF_CHECKPOINTS}
    return ({"sizes": sizes} if is_short else {}) | {
        name: value
        for name, value in kept.items()
        if isinstance(value, int) or (isinstance(value, str) and len(value) <= LONGEST_WORD)
    }


class FrameBody:
    """The bytes behind a frame's head: read piece by piece, and to their end before the next frame."""

    def __init__(self, stream: Stream, size: int) -> None:
        self._stream = stream
        self.left = size

    def pieces(self) -> Iterator[bytes]:
        while self.left:
            piece = self._stream.read(min(self.left, CHUNK_BYTES))
            if not piece:
                raise Interrupted("the job hung up inside a frame")
            self.left -= len(piece)
            yield piece

    def skip(self) -> None:
        for _ in self.pieces():
            pass


def pad(data: Iterator[bytes], size: int) -> Iterator[bytes]:
    """`size` bytes: where the stored ones are damaged, zeros from there on. The run verifies what it gets."""
    sent = 0
    try:
        for piece in data:
            sent += len(piece)
            yield piece
    except FalajError as error:
        log.warning("a checkpoint could not be read to its end", extra={"reason": error.message})
    while sent < size:
        missing = min(size - sent, CHUNK_BYTES)
        sent += missing
        yield bytes(missing)


def is_owner(connection: socket.socket, home: Path) -> bool:
    """Whether the process at the other end has the uid that owns `home`."""
    if sys.platform != "linux":
        return True  # only there jobs have uids of their own
    try:
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        return bool(PEER.unpack(peer)[1] == home.stat().st_uid)
    except OSError:
        return False


def _listen(folder: Path) -> socket.socket:
    """A socket that the job may connect to, put in the place of an earlier one at a stroke."""
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
        raise ValueError(f"sizes are those of at most {MAX_PARTS} parts, in bytes")
    return found


def _count(number: int) -> int:
    if not 0 <= number < 1 << 62:
        raise ValueError("a step is 0 or more, and fits into 62 bits")
    return number


def _code(head: dict[str, Any], error: Exception) -> str:
    """What the run is told: that it asked for something impossible, or that the agent cannot do it."""
    is_loading = head.get("call") in ("load_manifest", "load_part")
    if is_loading and isinstance(error, FalajError):
        return CheckpointDamaged.code
    known = isinstance(error, FalajError) and not isinstance(error, InvalidInput)
    return AgentLost.code if known else InvalidTraining.code
