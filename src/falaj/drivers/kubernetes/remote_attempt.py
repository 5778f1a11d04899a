"""One attempt whose nodes run elsewhere, on the platform's disk: what workers fetch, and what they reported.

The controller serves it to workers; any process of the platform reads it. Everything is on disk before it is answered.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from falaj.drivers.fsync import sync_directory
from falaj.drivers.processes.attempt_folder import create_marker, open_private, read_json, write_json
from falaj.errors import Conflict, InvalidInput, NotFound, TooLarge
from falaj.ports.launcher import PodImage, WorkerOrder

CHUNK_BYTES = 1 << 20
FETCH_BYTES = 16 << 20
"""The most bytes of a file in one answer."""
RESULT_BYTES = 64 << 10
PACKAGES_LIMIT = 256 << 10
"""The most characters of a list of packages."""
MOST_OUTPUTS = 10_000
LONGEST_PATH = 500
LOG_PIECE_BYTES = 4 << 20
LOG_LIMIT_BYTES = 257 << 20
"""A supervisor keeps 256 MiB and the end of what its processes print."""
INDEX_ENTRY = struct.Struct("<II")
"""The number of a node and the length of a piece of its log, in the order in which pieces arrived."""
FETCHED = ("code", "inputs")

Objects = Literal["trainjob", "jobset", "job"]


@dataclass(frozen=True)
class AttemptReports:
    """What is known of an attempt: who claimed its nodes, how they ended, and how it ended if no worker said it.

    `eviction` says why Kueue has taken back its admission.
    """

    claims: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    results: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    verdict: Mapping[str, Any] | None = None
    nodes: int = 1
    is_created: bool = False
    deciding: tuple[int, ...] = (0,)
    eviction: Mapping[str, Any] | None = None

    @property
    def is_decided(self) -> bool:
        """Return whether all nodes whose end decides have succeeded: the others are only to be stopped."""
        return have_succeeded(self.deciding, self.results)

    def counting(self) -> list[Mapping[str, Any]]:
        """Return the results that count: a node without deciding processes that was stopped has done its part."""
        return [
            result
            for rank, result in self.results.items()
            if rank in self.deciding or not result["stopped"] or result.get("evicted")
        ]


@dataclass(frozen=True)
class RemoteAttempt:
    """The attempt in `folder`. `lease_left_s` returns how long this home's controller is certainly in charge."""

    folder: Path
    lease_left_s: Callable[[], float] = lambda: 0.0
    log_limit_bytes: int = LOG_LIMIT_BYTES
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _fixed: dict[str, Any] = field(default_factory=dict)
    """What was read and never changes: workers call often."""

    # ------------------------------------------------------------------------------------ for the launcher

    @property
    def launch_file(self) -> Path:
        return self.folder / "launch.json"

    @property
    def created_file(self) -> Path:
        """Exists once all objects of the attempt were created in the cluster."""
        return self.folder / "created.json"

    @property
    def stop_file(self) -> Path:
        return self.folder / "stop.json"

    @property
    def verdict_file(self) -> Path:
        """How the attempt ended if no worker said it: no worker is served any more."""
        return self.folder / "verdict.json"

    @property
    def eviction_file(self) -> Path:
        """Why Kueue evicted the attempt, while it ran: its Workload says so only until it is admitted again."""
        return self.folder / "eviction.json"

    def prepare(
        self,
        launch: Mapping[str, Any],
        directory: Path,
        *,
        objects: Objects,
        namespace: str,
        deciding: Sequence[int],
    ) -> None:
        """Record what to run, as which objects in which namespace, the nodes whose end decides, and the hashes of the
        files that it needs."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(self.folder / "files.json", {"files": list_files(directory)})
        made = {"objects": objects, "namespace": namespace, "deciding": list(deciding)}
        write_json(self.folder / "objects.json", made)
        write_json(self.launch_file, {**launch, "directory": str(directory)})

    def objects(self) -> Objects | None:
        """Return which objects of the cluster the attempt is; none before that is decided."""
        found = read_json(self.folder / "objects.json")
        return None if found is None else found["objects"]

    def deciding(self) -> tuple[int, ...]:
        """Return the nodes whose end decides."""
        found = read_json(self.folder / "objects.json")
        return (0,) if found is None else tuple(found.get("deciding") or range(self.nodes))

    @property
    def namespace(self) -> str:
        """The namespace of its objects."""
        return str((read_json(self.folder / "objects.json") or {})["namespace"])

    @property
    def directory(self) -> Path:
        return Path(self._spec()["directory"])

    @property
    def nodes(self) -> int:
        if "nodes" not in self._fixed:
            self._fixed["nodes"] = int(self._spec().get("nodes", 1))
        return int(self._fixed["nodes"])

    def claims(self) -> dict[int, dict[str, Any]]:
        """Return who runs each node, and since when."""
        return self._per_node("claim")

    def results(self) -> dict[int, dict[str, Any]]:
        return self._per_node("ended")

    def reports(self) -> AttemptReports:
        return AttemptReports(
            self.claims(),
            self.results(),
            read_json(self.verdict_file),
            int((read_json(self.launch_file) or {}).get("nodes", 1)),
            self.created_file.exists(),
            self.deciding(),
            read_json(self.eviction_file),
        )

    def image(self) -> PodImage:
        """Return the image of its pods, and its packages, as far as they were reported."""
        ran = (read_json(self.folder / "image.json") or {}).get("ran")
        packages = (read_json(self.folder / "packages.json") or {}).get("packages", "")
        return PodImage(str((read_json(self.launch_file) or {}).get("image") or ""), ran, str(packages))

    def record_image(self, ran: str) -> None:
        """Record the digest of the image that its pods ran, as the cluster reported it."""
        write_json(self.folder / "image.json", {"ran": ran})

    def request_stop(self, grace_s: float) -> None:
        write_json(self.stop_file, {"grace_s": grace_s})

    def close(self, verdict: Mapping[str, Any], *, unless_claimed: bool = False) -> bool:
        """Record how the attempt ended, unless a worker did; no claim succeeds from now on. Return whether it did."""
        with self._locked():
            if self.verdict_file.exists() or (unless_claimed and self.claims()):
                return False
            write_json(self.verdict_file, verdict)
            return True

    def read_log(self, *, offset: int, limit: int) -> bytes:
        """Return a part of the logs of all nodes, in the order in which their pieces arrived."""
        found, passed = bytearray(), 0
        at = dict[int, int]()
        for node, length in self._index():
            start = at.get(node, 0)
            at[node] = start + length
            skipped = max(0, offset - passed)
            passed += length
            if skipped >= length:
                continue
            with contextlib.suppress(FileNotFoundError), open(self._log(node), "rb") as file:
                file.seek(start + skipped)
                found += file.read(min(length - skipped, limit - len(found)))
            if len(found) >= limit:
                break
        return bytes(found)

    # ----------------------------------------------------------------------------------------- for workers

    def claim(self, node_rank: int, pod: str) -> None:
        with self._locked():
            self._check_node(node_rank)
            path = self.folder / f"claim.{node_rank}.json"
            held = read_json(path)
            if held is not None and held["pod"] == pod:
                return
            if held is not None:
                raise Conflict(f"node {node_rank} of the attempt is run by another pod, {held['pod']}")
            if self.verdict_file.exists() or self.stop_file.exists():
                raise Conflict("the attempt is over")
            create_marker(path, json.dumps({"pod": pod, "claimed_at": time.time()}))

    def launch(self, node_rank: int, pod: str) -> dict[str, Any]:
        self._require_holder(node_rank, pod)
        spec = {name: value for name, value in self._spec().items() if name != "image"}
        return spec | {"node_rank": node_rank}

    def files(self) -> bytes:
        return json.dumps((read_json(self.folder / "files.json") or {})["files"]).encode()

    def read_file(self, path: str, *, offset: int, length: int) -> tuple[int, Iterator[bytes]]:
        if "sizes" not in self._fixed:
            self._fixed["sizes"] = {each["path"]: each["size"] for each in json.loads(self.files())}
        known: dict[str, int] = self._fixed["sizes"]
        if path not in known:
            raise NotFound(f"the attempt has no file {path[:200]!r}")
        size = max(0, min(length, FETCH_BYTES, known[path] - offset)) if offset >= 0 else 0
        return size, _pieces(self.directory / path, offset, size)

    def append_log(self, node_rank: int, pod: str, *, offset: int, body: Iterator[bytes]) -> int:
        self._require_holder(node_rank, pod)
        data = _joined(body)
        with self._turn, open(self._log(node_rank), "ab", opener=open_private) as file:
            size = self._repair_index(node_rank, file.tell())
            if offset > size and size < self.log_limit_bytes:
                raise InvalidInput.at("offset", given=offset, allowed=f"at most {size}, the end of the log")
            new = data[max(0, size - offset) :][: max(0, self.log_limit_bytes - size)]
            if new:
                file.write(new)
                file.flush()
                self._add_to_index(node_rank, len(new))
            return max(offset + len(data), size)  # what exceeds the limit is dropped

    def save_output(
        self, node_rank: int, pod: str, path: str, *, size: int, sha256: str, body: Iterator[bytes]
    ) -> None:
        self._require_holder(node_rank, pod)
        target = self.directory / "outputs" / checked_path(path)
        if node_rank and target.exists():
            return  # the file of an earlier node counts
        self._check_room(size, target)
        draft = self.folder / f"output.{node_rank}"
        digest, written = hashlib.sha256(), 0
        with open(draft, "wb", opener=open_private) as file:
            for piece in body:
                written += len(piece)
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if written != size or digest.hexdigest() != sha256:
            draft.unlink()
            raise InvalidInput.at(path, given=f"{written} bytes", allowed="the bytes that were announced")
        with self._turn:
            if node_rank and target.exists():  # it came meanwhile
                draft.unlink()
                return
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.replace(draft, target)
        sync_directory(target.parent)

    def save_packages(self, node_rank: int, pod: str, body: Iterator[bytes]) -> None:
        self._require_holder(node_rank, pod)
        listed = _joined(body).decode(errors="replace")[:PACKAGES_LIMIT]
        if node_rank == 0:
            write_json(self.folder / "packages.json", {"packages": listed})

    def renew(self, node_rank: int, pod: str) -> WorkerOrder:
        self._require_holder(node_rank, pod)
        if self.verdict_file.exists():
            raise Conflict("the attempt is over")
        stop, ended = read_json(self.stop_file), self.results()
        if stop is None and have_succeeded(self.deciding(), ended):
            stop = {"grace_s": 0.0}  # parameter servers never end by themselves
        elif stop is None and any(result["exit_code"] != 0 for result in ended.values()):
            stop = {"grace_s": float(self._spec().get("grace_s", 10.0))}  # the nodes end together
        return WorkerOrder(self.lease_left_s(), None if stop is None else float(stop["grace_s"]))

    def end(self, node_rank: int, pod: str, result: Mapping[str, Any]) -> None:
        self._require_holder(node_rank, pod)
        if len(json.dumps(result)) > RESULT_BYTES:
            raise TooLarge(f"a result of more than {RESULT_BYTES} bytes")
        claimed_at = (read_json(self.folder / f"claim.{node_rank}.json") or {}).get("claimed_at", 0.0)
        found = within(checked_result(result), claimed_at, time.time())
        with contextlib.suppress(FileExistsError):
            create_marker(self.folder / f"ended.{node_rank}.json", json.dumps(found))

    # ---------------------------------------------------------------------------------------------- files

    def _spec(self) -> dict[str, Any]:
        found = read_json(self.launch_file)
        if found is None:
            raise Conflict("the attempt is over")
        return found

    def _log(self, node_rank: int) -> Path:
        return self.folder / f"log.{node_rank}"

    def _per_node(self, kind: str) -> dict[int, dict[str, Any]]:
        found = {}
        for path in self.folder.glob(f"{kind}.*.json"):
            content = read_json(path)
            if content is not None:
                found[int(path.name.split(".")[1])] = content
        return found

    def _check_node(self, node_rank: int) -> None:
        if not 0 <= node_rank < self.nodes:
            raise InvalidInput.at("node_rank", given=node_rank, allowed=f"0 to {self.nodes - 1}")

    def _require_holder(self, node_rank: int, pod: str) -> None:
        self._check_node(node_rank)
        held = read_json(self.folder / f"claim.{node_rank}.json")
        if held is None or held["pod"] != pod:
            raise Conflict(f"node {node_rank} of the attempt is not run by pod {pod[:100]}")

    def _check_room(self, size: int, target: Path) -> None:
        limit, folder = self._spec().get("disk_bytes"), self.directory / "outputs"
        others = [path.stat().st_size for path in folder.rglob("*") if path.is_file() and path != target]
        if len(others) >= MOST_OUTPUTS:
            raise TooLarge(f"more than {MOST_OUTPUTS} output files")
        if limit is not None and sum(others) + size > limit * self.nodes:
            raise TooLarge(f"outputs of more than {limit} bytes, the disk that the job may use")

    def _index(self) -> Iterator[tuple[int, int]]:
        with contextlib.suppress(FileNotFoundError):
            data = (self.folder / "log.index").read_bytes()
            whole = len(data) - len(data) % INDEX_ENTRY.size
            yield from INDEX_ENTRY.iter_unpack(data[:whole])

    def _add_to_index(self, node_rank: int, length: int) -> None:
        """Add a piece; one that follows a piece of the same node is added to that, so that the index stays short."""
        handle = os.open(self.folder / "log.index", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with open(handle, "r+b") as file:
            end = os.fstat(handle).st_size // INDEX_ENTRY.size * INDEX_ENTRY.size
            last = max(0, end - INDEX_ENTRY.size)
            file.seek(last)
            before = INDEX_ENTRY.unpack(file.read(INDEX_ENTRY.size)) if end else (node_rank, 0)
            at, length = (last, before[1] + length) if before[0] == node_rank else (end, length)
            file.seek(at)
            file.write(INDEX_ENTRY.pack(node_rank, length))

    def _repair_index(self, node_rank: int, size: int) -> int:
        """Add what a killed controller wrote to a log and not to the index. Return the size."""
        known = sum(length for node, length in self._index() if node == node_rank)
        if known < size:
            self._add_to_index(node_rank, size - known)
        return size

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other threads and processes: of a claim and a verdict, only one may succeed."""
        handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def have_succeeded(nodes: Iterable[int], results: Mapping[int, Mapping[str, Any]]) -> bool:
    """Return whether all of these nodes have ended, and well."""
    return all(results.get(rank, {}).get("exit_code") == 0 for rank in nodes)


def list_files(directory: Path) -> list[dict[str, Any]]:
    """Return the code and the inputs in `directory`, with their sizes and hashes; links are left out."""
    return [
        {
            "path": path.relative_to(directory).as_posix(),
            "size": path.stat().st_size,
            "sha256": file_hash(path),
            "mode": path.stat().st_mode & 0o777,
        }
        for part in FETCHED
        for path in sorted((directory / part).rglob("*"))
        if path.is_file() and not path.is_symlink()
    ]


def file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _joined(body: Iterator[bytes]) -> bytes:
    data = bytearray()
    for piece in body:
        data += piece
        if len(data) > LOG_PIECE_BYTES:
            raise TooLarge(f"a piece of the log of more than {LOG_PIECE_BYTES} bytes")
    return bytes(data)


def _pieces(path: Path, offset: int, size: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        file.seek(offset)
        while size > 0 and (piece := file.read(min(size, CHUNK_BYTES))):
            size -= len(piece)
            yield piece


def checked_path(path: str) -> Path:
    """Return a relative path of plain names; InvalidInput for any other, which could lead out of the folder."""
    parts = path.split("/")
    is_plain = all(part not in ("", ".", "..") and not set(part) & {"\\", "\0"} for part in parts)
    if not is_plain or len(path) > LONGEST_PATH:
        allowed = f"plain names, no '\\', and at most {LONGEST_PATH} characters"
        raise InvalidInput.at("path", given=path[:LONGEST_PATH], allowed=allowed)
    return Path(*parts)


def checked_result(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a node as the supervisor writes it. User code could have sent it: nothing is trusted."""

    def whole(name: str) -> int | None:
        value = _number(given.get(name), most=100_000)
        return None if value is None else int(value)

    reported = given.get("used")
    used = reported if isinstance(reported, dict) else {}
    limits = given.get("limits")
    reason = given.get("reason")
    return {
        "exit_code": whole("exit_code"),
        "signal": whole("signal"),
        "reason": str(reason)[:2000] if reason is not None else None,
        "started_at": _number(given.get("started_at"), most=LAST_SECOND) or 0.0,
        "ended_at": _number(given.get("ended_at"), most=LAST_SECOND) or 0.0,
        "used": {
            name: int(value) if name == "peak_memory_bytes" else value
            for name in USAGE
            if (value := _number(used.get(name), most=2**60)) is not None
        },
        "limits": [str(each)[:300] for each in limits[:20]] if isinstance(limits, list) else [],
        "stopped": given.get("stopped") is True,
        "fenced": given.get("fenced") is True,
        "evicted": given.get("evicted") is True,
        "lost": given.get("lost") is True,
    }


def within(result: dict[str, Any], first: float, last: float) -> dict[str, Any]:
    """Return a result whose times lie between `first` and `last`, in order: another machine's clock may be wrong."""
    started_at = min(max(result["started_at"], first), max(first, last))
    return result | {
        "started_at": started_at,
        "ended_at": min(max(result["ended_at"], started_at), max(first, last)),
    }


USAGE = ("cpu_s", "peak_memory_bytes", "cpu_energy_j", "gpu_energy_j")
LAST_SECOND = 253_402_300_799
"""The end of the year 9999, since 1970."""


def _number(value: object, *, most: float) -> float | None:
    """Return a number from 0 to `most`; none for anything else, as NaN and infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= most else None
